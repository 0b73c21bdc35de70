"""What the process that leads adds to the leader: messages to people."""

from pathlib import Path

from msgspec.structs import replace

from orchestrator.backends.entry.leader import _notifying
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.agent_protocol import Leave
from orchestrator.contract.messages.events import Event, NoticeSent
from orchestrator.contract.spec.reporting.notify_spec import NotifySpec
from orchestrator.job.state import Run
from orchestrator.journal.journal import read
from tests.leader.leader_world import LedJob, run_script, stopped

TOLD = NoticeSent(at=7.0, notice="incident-1", receiver="1 command", delivered=True, tries=1)
LATER = replace(TOLD, receiver="2 command")


def test_messages_that_arrive_as_the_job_ends_have_their_lines(tmp_path: Path) -> None:
    """The first line is in the queue behind the end, the second comes while that one is written.
    Without them a next leader would send the messages again."""

    async def script(job: LedJob) -> None:
        def record(run: Run) -> None:
            """Runs after the last event was taken from the queue."""
            job.leader.events.happened(TOLD)

        feed = job.leader.supervisor.feed

        def write(event: Event) -> tuple[Action, ...]:
            if event == TOLD:
                job.leader.events.happened(LATER)
            return feed(event)

        job.leader.supervisor.feed = write  # type: ignore[method-assign]
        job.leader.storage.record_speed = record  # type: ignore[method-assign]
        async with _notifying(RunDir(tmp_path), job.leader, {}):
            zero, one = await job.start_both()
            for agent in (zero, one):
                await agent.send(stopped(agent.host, finished=True))
            for agent in (zero, one):
                await agent.expect(Leave)
                await agent.ws.close()
            await job.end()

    silent = (NotifySpec(on=("budget_low",), command=("true",)),)
    run_script(tmp_path, script, notify=silent)
    told = [entry.event for entry in read(RunDir(tmp_path).journal)]
    assert told[-2:] == [TOLD, LATER]

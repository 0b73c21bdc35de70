"""The laws of the simulation find leaders and agents with a defect. The correct ones survive the
same faults."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from orchestrator.agent.agent import Agent
from orchestrator.contract.files.fence import Fence
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.agent_protocol import Register
from orchestrator.errors import Ended, Unanswered
from orchestrator.journal.journal import Decided, Entry
from orchestrator.journal.supervisor import OpenJournal, Supervisor
from orchestrator.seams import AllocationBackend
from orchestrator.simulation.processes.agent_process import AgentProcess
from orchestrator.simulation.processes.backend import SlurmBackend
from orchestrator.simulation.processes.run_dir import StoredRunDir
from orchestrator.simulation.run import simulate
from orchestrator.simulation.world.scheduler import Scheduler
from orchestrator.simulation.world.storage import StoredJournal

KILL = ("rank",)
CUT = ("partition", "switch", "pause")


class NoFence(StoredRunDir):
    """Writes no leader to the fence and never reads it."""

    def take_over(self, name: str) -> None:
        self.process.took_over(name)

    def check_leader(self, name: str) -> None:
        pass

    def write_fence(self, fence: Fence) -> None:
        pass


class FenceNeverWritten(StoredRunDir):
    """The write of the fence fails after that of the journal, and the leader continues."""

    def write_fence(self, fence: Fence) -> None:
        pass


class IgnoresFence(StoredRunDir):
    """Opens the journal although another process holds its lock, and ignores a new leader in the
    fence."""

    def check_leader(self, name: str) -> None:
        pass

    async def open_journal(self, name: str, patience_s: float) -> StoredJournal:
        self.storage.holder = None
        return await super().open_journal(name, patience_s)


class LeaderWithoutFence(AgentProcess):
    run_dir_type = NoFence


class LeaderFailsToWriteFence(AgentProcess):
    run_dir_type = FenceNeverWritten


class SecondLeader(AgentProcess):
    run_dir_type = IgnoresFence


class JournalIgnoresWriteErrors(StoredJournal):
    """Ignores a write error, so lines that the disk refused count as written."""

    def extend(self, decided: Decided) -> tuple[Entry, ...]:
        try:
            return super().extend(decided)
        except OSError:
            return ()


class LeaderIgnoresWriteErrors(AgentProcess):
    """A leader on such a journal. Storage fails between two writes, and it continues."""

    def _supervisor(self, journal: OpenJournal) -> Supervisor:
        cast(Any, journal).__class__ = JournalIgnoresWriteErrors
        return super()._supervisor(journal)


class LostAnswer(SlurmBackend):
    """The first answer to a requeue is lost after the scheduler has requeued the job."""

    error: type[Unanswered] | type[Ended] = Unanswered

    async def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        first = not self.process.requested_requeue
        await super().requeue(launch, exclude, again=again, whole=whole)
        if first:
            raise self.error("the answer is lost")


class LostAnswerForRefusal(LostAnswer):
    error = Ended


class LosesRequeueAnswer(AgentProcess):
    backend_type: type[LostAnswer] = LostAnswer

    def _backend_named(self, name: str) -> AllocationBackend:
        scheduler = self.world.scheduler
        if not isinstance(scheduler, Scheduler) or not self.world.scenario.scheduled:
            return super()._backend_named(name)
        return cast(AllocationBackend, self.backend_type(self, scheduler))


class TakesLostAnswerAsRefusal(LosesRequeueAnswer):
    backend_type = LostAnswerForRefusal


class ReconnectsWithStaleState(AgentProcess):
    """Its agent reports on each connection that it runs no ranks."""

    def _new_agent(self) -> Agent:
        agent = super()._new_agent()
        register = agent._register

        def stale() -> Register:
            stored = register()
            return replace(stored, agent=replace(stored.agent, running=0))

        cast(Any, agent)._register = stale
        return agent


@pytest.mark.parametrize(
    ("process", "kinds", "law", "first"),
    [
        (LeaderWithoutFence, KILL, "the fence names another leader", 0),
        (LeaderFailsToWriteFence, KILL, "the fence does not name it", 0),
        (SecondLeader, CUT, "gives other actions", 17),
        (
            LeaderIgnoresWriteErrors,
            ("storage-full", "leader", "rank"),
            "replaying gives another state",
            5,
        ),
        (TakesLostAnswerAsRefusal, ("host", "drain"), "counts as refused", 0),
        (ReconnectsWithStaleState, ("stuck", "messages", "rank"), "still runs", 18),
    ],
)
def test_a_law_finds_each_broken_process(
    process: type[AgentProcess], kinds: Sequence[str], law: str, first: int
) -> None:
    seeds = range(first, first + 100)
    found = (simulate(seed, kinds, start_agent=process).broken for seed in seeds)
    assert law in next(filter(None, found))


def test_a_leader_survives_the_lost_answer_of_a_requeue() -> None:
    outcomes = [
        simulate(seed, ("host", "drain"), start_agent=LosesRequeueAnswer) for seed in range(8)
    ]
    assert [one.broken for one in outcomes if one.broken] == []


def test_a_leader_survives_storage_that_fails_between_writes() -> None:
    outcomes = [simulate(seed, ("storage-full", "leader", "rank")) for seed in range(8)]
    assert [one.broken for one in outcomes if one.broken] == []

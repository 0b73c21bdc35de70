"""The leader of a job: which agents it admits, what it orders, how the job ends."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.agent.connection import Line
from orchestrator.agent.rank_socket import free_port
from orchestrator.contract.files.leader_file import announce
from orchestrator.contract.messages.actions import EndJob
from orchestrator.contract.messages.agent_protocol import (
    Digest,
    Evidence,
    Gather,
    Leave,
    ProfileWish,
    RankDigest,
    RankProfiles,
    RankStacks,
    Register,
    Start,
    Stop,
)
from orchestrator.contract.messages.events import (
    AgentRegistered,
    CheckpointSaved,
    EvidenceGathered,
    HangDetected,
    HangOver,
    JobSubmitted,
    LeaderStarted,
    TrainingResumed,
)
from orchestrator.journal.journal import read
from orchestrator.leader.leader_server import LeaderServer, Questions
from tests.agent.world import LAUNCH, SECRET, WAIT_S, until
from tests.leader.leader_world import (
    SILENT_S,
    FakeAgent,
    LedJob,
    exited,
    run_script,
    start_attempt,
    stopped,
)

INIT_S = 20.0
"""`init_timeout`, longer than ranks take to start here on any machine."""


def test_an_agent_of_another_launch_is_refused(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        agent = await job.connect("host-0", launch=LAUNCH - 1)
        await agent.register(launch=LAUNCH - 1)
        await agent.wait_closed()
        assert agent.ws.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION
        assert job.events(AgentRegistered) == []

    run_script(tmp_path, script)


def test_two_agents_start_together_each_with_its_node_rank(tmp_path: Path) -> None:
    async def script(job: LedJob) -> tuple[Start, Start]:
        one = await job.agent("host-1")
        await job.wait_for_event(AgentRegistered)
        zero = await job.agent("host-0")
        return await start_attempt(zero, one, 1)

    first, second = run_script(tmp_path, script)
    assert (first.node_rank, second.node_rank) == (0, 1)
    for start in (first, second):
        assert (start.attempt, start.nodes, start.ranks_per_host) == (1, 2, 1)
        assert (start.master_address, start.master_port) == ("10.0.0.1", 20_001)
        assert start.config == str(tmp_path / "trainer-1.json")


def test_an_agent_that_connects_at_once_is_journalled_after_the_leader_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent in the leader's process connects while the leader still writes its address."""

    registered = threading.Event()

    def announce_slowly(*where: Any) -> None:
        announce(*where)
        assert registered.wait(WAIT_S)

    monkeypatch.setattr("orchestrator.leader.storage.announce", announce_slowly)

    async def script(job: LedJob) -> None:
        await job.agent("host-0")
        await until(lambda: job.leader.sessions.by_host, "the agent")
        registered.set()
        await job.wait_for_event(AgentRegistered)
        assert [type(entry.event) for entry in read(job.run_dir.journal)] == [
            JobSubmitted,
            LeaderStarted,
            AgentRegistered,
        ]

    run_script(tmp_path, script)


def test_a_rank_that_dies_stops_all_and_the_next_attempt_starts(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        await zero.send(
            TrainingResumed(attempt=1, step=0),
            CheckpointSaved(attempt=1, step=4),
        )
        await one.send(exited(1, "host-1"))
        for agent in (zero, one):
            assert (await agent.expect(Stop)).attempt == 1
        await zero.send(stopped("host-0"))
        await one.send(exited(1, "host-1"), stopped("host-1"))
        first, _ = await start_attempt(zero, one, 2)
        assert (first.attempt, first.master_port) == (2, 20_002)
        run = job.leader.supervisor.run
        assert [incident.kind for incident in run.history.incidents] == ["rank-killed"]
        assert (run.history.restarts, run.progress.saved) == (1, 4)

    run_script(tmp_path, script)


def test_a_job_that_ends_orders_every_agent_to_leave(tmp_path: Path) -> None:
    async def script(job: LedJob) -> EndJob:
        zero, one = await job.start_both()
        await zero.send(stopped("host-0", finished=True))
        await one.send(stopped("host-1", finished=True))
        for agent in (zero, one):
            assert "all ranks finished" in (await agent.expect(Leave)).reason
            await agent.ws.close()
        return await job.end()

    assert run_script(tmp_path, script).state == "SUCCEEDED"
    assert json.loads((tmp_path / "leader.json").read_text()) == {
        "launch": LAUNCH,
        "restarts": 0,
        "over": True,
    }


def test_an_agent_that_does_not_leave_delays_the_leader_only_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.leader.FAREWELL_S", SILENT_S)
    monkeypatch.setattr("orchestrator.leader.leader_server.CLOSE_S", 0.2)

    async def script(job: LedJob) -> EndJob:
        zero, _ = await job.start_both()
        assert await job.request_cancel() == 202
        await zero.expect(Stop)
        await zero.send(stopped("host-0"), stopped("host-1"))
        await zero.expect(Leave)
        late = await job.agent("host-7")
        await late.expect(Leave)
        assert not job.task.done()
        job.clock.put_forward(SILENT_S)
        return await job.end()

    assert run_script(tmp_path, script).state == "CANCELLED"


def test_a_cancel_request_stops_the_ranks_with_time_for_a_checkpoint(tmp_path: Path) -> None:
    async def script(job: LedJob) -> EndJob:
        zero, one = await job.start_both()
        for body in (b"{", b"[]", b""):
            assert await job.request_cancel(body) == 400
        assert await job.request_cancel() == 202
        for agent in (zero, one):
            stop = await agent.expect(Stop)
            assert (stop.attempt, stop.grace_s) == (1, 5.0)
            await agent.send(stopped(agent.host))
        for agent in (zero, one):
            await agent.expect(Leave)
            await agent.ws.close()
        return await job.end()

    ending = run_script(tmp_path, script)
    assert (ending.state, ending.reason) == ("CANCELLED", "cancelled by me")


def first_step(rank: int, attempt: int) -> Digest:
    """The digest of a rank that has done its first step."""
    done = RankDigest(
        rank=rank,
        pid=1,
        step=1,
        phase="train",
        age_s=0.0,
        still_s=0.0,
        loss=2.5,
        tokens_per_second=7.0,
    )
    return Digest(attempt=attempt, ranks=(done,))


def test_the_first_step_is_recorded_from_the_digest(tmp_path: Path) -> None:
    async def script(job: LedJob) -> str:
        zero, _ = await job.start_both()
        await zero.send(first_step(0, attempt=7), first_step(0, attempt=1))
        await until(lambda: job.leader.supervisor.run.attempt.step == 1, "the step")
        return job.leader.supervisor.run.state

    assert run_script(tmp_path, script) == "RUNNING"


def test_evidence_of_a_hang_is_gathered_before_ranks_stop(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        await wait_for_hang(job, zero, one)
        for agent in (zero, one):
            assert (await agent.expect(Gather)).attempt == 1
        for agent in (zero, one):
            await agent.send(Evidence(event=EvidenceGathered(attempt=1, host=agent.host, ranks=())))
        for agent in (zero, one):
            assert (await agent.expect(Stop)).attempt == 1

    run_script(tmp_path, script, init_timeout=INIT_S)


async def wait_for_hang(job: LedJob, *agents: FakeAgent) -> None:
    """Let time pass until the leader detects a hang."""
    while not job.events(HangDetected):
        await job.pass_time(*agents)


def test_an_attempt_continues_if_its_ranks_make_progress_during_the_diagnosis(
    tmp_path: Path,
) -> None:
    async def script(job: LedJob) -> tuple[list[str], int]:
        zero, one = await job.start_both()
        await wait_for_hang(job, zero, one)
        for agent in (zero, one):
            await agent.expect(Gather)
        await zero.send(Evidence(event=EvidenceGathered(attempt=1, host="host-0", ranks=())))
        await one.send(
            first_step(1, attempt=1),
            Evidence(event=EvidenceGathered(attempt=1, host="host-1", ranks=())),
        )
        over = await job.wait_for_event(HangOver)
        assert (over.rank, over.step, over.phase) == (1, 1, "train")
        await until(lambda: job.leader.supervisor.run.state == "RUNNING", "the attempt to continue")
        await until(lambda: len(job.events(EvidenceGathered)) == 2, "the evidence of both")
        kinds = [type(action).__name__ for e in read(job.run_dir.journal) for action in e.actions]
        return kinds, len(job.leader.supervisor.run.history.incidents)

    assert run_script(tmp_path, script, init_timeout=INIT_S) == (
        ["StartAttempt", "GatherEvidence"],
        0,
    )


def test_the_leader_uses_the_wanted_port_unless_it_is_taken(tmp_path: Path) -> None:
    async def no_agent(register: Register, ws: Line) -> None:
        raise AssertionError("no agent connects")

    async def no_ranks() -> RankStacks:
        raise AssertionError("nobody asks")

    async def no_profile(wish: ProfileWish) -> RankProfiles:
        raise AssertionError("nobody asks")

    async def script() -> list[int]:
        wanted = free_port("127.0.0.1")
        questions = Questions(stacks=no_ranks, profiles=no_profile)
        servers = [LeaderServer(SECRET, LAUNCH, no_agent, str, questions) for _ in range(2)]
        found = [await one.open("127.0.0.1", wanted, tmp_path) for one in servers]
        for one in servers:
            await one.close()
        return [wanted, *found]

    wanted, first, second = asyncio.run(script())
    assert first == wanted
    assert second not in (0, wanted)

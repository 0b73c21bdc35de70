"""A job that is led: who is let in, what is ordered, how it ends."""

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
    RankDigest,
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
from orchestrator.leader.leader_server import LeaderServer
from tests.agent.world import LAUNCH, SECRET, WAIT_S, until
from tests.leader.leader_world import SILENT_S, FakeAgent, Led, exited, go, play, stopped

INIT_S = 20.0
"""That ranks may take to begin: longer than they do here, on any machine."""


def test_an_agent_of_another_launch_is_sent_away(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        agent = await job.connect("host-0", launch=LAUNCH - 1)
        await agent.register(launch=LAUNCH - 1)
        await agent.is_closed()
        assert agent.ws.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION
        assert job.events(AgentRegistered) == []

    play(tmp_path, script)


def test_two_agents_start_together_each_with_its_node_rank(tmp_path: Path) -> None:
    async def script(job: Led) -> tuple[Start, Start]:
        one = await job.agent("host-1")
        await job.happens(AgentRegistered)
        zero = await job.agent("host-0")
        return await go(zero, one, 1)

    first, second = play(tmp_path, script)
    assert (first.node_rank, second.node_rank) == (0, 1)
    for start in (first, second):
        assert (start.attempt, start.nodes, start.ranks_per_host) == (1, 2, 1)
        assert (start.master_address, start.master_port) == ("10.0.0.1", 20_001)
        assert start.config == str(tmp_path / "trainer-1.json")


def test_an_agent_that_finds_the_leader_at_once_comes_after_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's own agent does, while that is still telling where it listens."""

    registered = threading.Event()

    def slowly(*where: Any) -> None:
        announce(*where)
        assert registered.wait(WAIT_S)

    monkeypatch.setattr("orchestrator.leader.storage.announce", slowly)

    async def script(job: Led) -> None:
        await job.agent("host-0")
        await until(lambda: job.leader.sessions.by_host, "the agent")
        registered.set()
        await job.happens(AgentRegistered)
        assert [type(entry.event) for entry in read(job.run_dir.journal)] == [
            JobSubmitted,
            LeaderStarted,
            AgentRegistered,
        ]

    play(tmp_path, script)


def test_a_rank_that_dies_stops_all_and_the_next_attempt_follows(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, one = await job.started()
        await zero.say(
            TrainingResumed(attempt=1, step=0),
            CheckpointSaved(attempt=1, step=4),
        )
        await one.say(exited(1, "host-1"))
        for agent in (zero, one):
            assert (await agent.hear(Stop)).attempt == 1
        await zero.say(stopped("host-0"))
        await one.say(exited(1, "host-1"), stopped("host-1"))
        first, _ = await go(zero, one, 2)
        assert (first.attempt, first.master_port) == (2, 20_002)
        run = job.leader.supervisor.run
        assert [incident.kind for incident in run.history.incidents] == ["rank-killed"]
        assert (run.history.restarts, run.progress.saved) == (1, 4)

    play(tmp_path, script)


def test_a_job_that_ends_lets_every_agent_go(tmp_path: Path) -> None:
    async def script(job: Led) -> EndJob:
        zero, one = await job.started()
        await zero.say(stopped("host-0", finished=True))
        await one.say(stopped("host-1", finished=True))
        for agent in (zero, one):
            assert "all ranks finished" in (await agent.hear(Leave)).reason
            await agent.ws.close()
        return await job.end()

    assert play(tmp_path, script).state == "SUCCEEDED"
    assert json.loads((tmp_path / "leader.json").read_text()) == {
        "launch": LAUNCH,
        "restarts": 0,
        "over": True,
    }


def test_an_agent_that_does_not_leave_holds_the_leader_up_only_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.leader.leader.FAREWELL_S", SILENT_S)
    monkeypatch.setattr("orchestrator.leader.leader_server.CLOSE_S", 0.2)

    async def script(job: Led) -> EndJob:
        zero, _ = await job.started()
        assert await job.cancels() == 202
        await zero.hear(Stop)
        await zero.say(stopped("host-0"), stopped("host-1"))
        await zero.hear(Leave)
        late = await job.agent("host-7")
        await late.hear(Leave)
        assert not job.task.done()
        job.clock.put_forward(SILENT_S)
        return await job.end()

    assert play(tmp_path, script).state == "CANCELLED"


def test_cancel_stops_the_ranks_with_time_for_a_checkpoint(tmp_path: Path) -> None:
    async def script(job: Led) -> EndJob:
        zero, one = await job.started()
        for body in (b"{", b"[]", b""):
            assert await job.cancels(body) == 400
        assert await job.cancels() == 202
        for agent in (zero, one):
            stop = await agent.hear(Stop)
            assert (stop.attempt, stop.grace_s) == (1, 5.0)
            await agent.say(stopped(agent.host))
        for agent in (zero, one):
            await agent.hear(Leave)
            await agent.ws.close()
        return await job.end()

    ending = play(tmp_path, script)
    assert (ending.state, ending.reason) == ("CANCELLED", "cancelled by me")


def test_the_first_step_is_recorded_from_the_digest(tmp_path: Path) -> None:
    def digest(rank: int, attempt: int) -> Digest:
        word = RankDigest(
            rank=rank,
            pid=1,
            step=1,
            phase="train",
            age_s=0.0,
            still_s=0.0,
            loss=2.5,
            tokens_per_second=7.0,
            memory_bytes=None,
        )
        return Digest(attempt=attempt, ranks=(word,))

    async def script(job: Led) -> str:
        zero, _ = await job.started()
        await zero.say(digest(0, attempt=7), digest(0, attempt=1))
        await until(lambda: job.leader.supervisor.run.attempt.step == 1, "the step")
        return job.leader.supervisor.run.state

    assert play(tmp_path, script) == "RUNNING"


def test_a_hang_is_looked_into_before_it_is_stopped(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, one = await job.started()
        await stands_still(job, zero, one)
        for agent in (zero, one):
            assert (await agent.hear(Gather)).attempt == 1
        for agent in (zero, one):
            await agent.say(Evidence(event=EvidenceGathered(attempt=1, host=agent.host, ranks=())))
        for agent in (zero, one):
            assert (await agent.hear(Stop)).attempt == 1

    play(tmp_path, script, init_timeout=INIT_S)


async def stands_still(job: Led, *agents: FakeAgent) -> None:
    """Until the leader has found out that its attempt does."""
    while not job.events(HangDetected):
        await job.pass_time(*agents)


def test_an_attempt_goes_on_whose_ranks_move_while_it_is_looked_into(tmp_path: Path) -> None:
    def word(rank: int) -> RankDigest:
        return RankDigest(
            rank=rank,
            pid=1,
            step=1,
            phase="train",
            age_s=0.0,
            still_s=0.0,
            loss=2.5,
            tokens_per_second=7.0,
            memory_bytes=None,
        )

    async def script(job: Led) -> tuple[list[str], int]:
        zero, one = await job.started()
        await stands_still(job, zero, one)
        for agent in (zero, one):
            await agent.hear(Gather)
        await zero.say(Evidence(event=EvidenceGathered(attempt=1, host="host-0", ranks=())))
        await one.say(
            Digest(attempt=1, ranks=(word(1),)),
            Evidence(event=EvidenceGathered(attempt=1, host="host-1", ranks=())),
        )
        over = await job.happens(HangOver)
        assert (over.rank, over.step, over.phase) == (1, 1, "train")
        await until(lambda: job.leader.supervisor.run.state == "RUNNING", "going on")
        await until(lambda: len(job.events(EvidenceGathered)) == 2, "the evidence of both")
        kinds = [type(action).__name__ for e in read(job.run_dir.journal) for action in e.actions]
        return kinds, len(job.leader.supervisor.run.history.incidents)

    assert play(tmp_path, script, init_timeout=INIT_S) == (["StartAttempt", "GatherEvidence"], 0)


def test_the_leader_takes_the_port_that_it_is_told_unless_another_has_it(tmp_path: Path) -> None:
    async def nothing(register: Register, ws: Line) -> None:
        raise AssertionError("no agent comes")

    async def script() -> list[int]:
        wanted = free_port("127.0.0.1")
        both = [LeaderServer(SECRET, LAUNCH, nothing, str) for _ in range(2)]
        found = [await one.open("127.0.0.1", wanted, tmp_path) for one in both]
        for one in both:
            await one.close()
        return [wanted, *found]

    wanted, first, second = asyncio.run(script())
    assert first == wanted
    assert second not in (0, wanted)

"""An agent that lost its leader becomes the leader, follows another one, or exits."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.agent.agent import Agent, AgentConfig
from orchestrator.backends.entry.leader import lead_on
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.fence import Fence, check_leader, read_fence, write_fence
from orchestrator.contract.files.leader_file import Term, leader_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, LaunchPlan
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    LeaderStarted,
    LeaveAsked,
    StepReached,
)
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.failover.after_leader import TakeOver
from orchestrator.failover.leader_lost import Claim, Outcome
from orchestrator.failover.takeover import follow
from orchestrator.failover.turns import Turn
from orchestrator.job.transitions import fold
from orchestrator.journal.journal import Journal, has_writer, read
from orchestrator.journal.supervisor import Supervisor
from orchestrator.posix.locks import is_free
from orchestrator.seams import AllocationBackend
from orchestrator.system import SystemClock
from tests.agent.world import (
    LAUNCH,
    SECRET,
    WAIT_S,
    FakeBackend,
    a_job,
    a_place,
    signal_ourselves,
    until,
)

HOSTS = ("host-0", "host-1")
GRANTED = Allocation(id="7", restarts=0, hosts=HOSTS)
HOW = "its process on host-0 had ended, and host-0 is well"


@dataclass
class GrantingBackend(FakeBackend):
    """A scheduler that reports the granted allocation."""

    def allocation(self, launch: LaunchPlan) -> Allocation:
        return GRANTED

    def cluster(self) -> str:
        return "tb"


# The three outcomes


@dataclass
class Follower:
    """A fake agent that has lost its leader from the start."""

    config: AgentConfig
    alone: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int | None = None
    last_heard: float = 0.0

    async def run(self) -> int:
        self.alone.set()
        await until(lambda: self.exit_code is not None, "its end")
        assert self.exit_code is not None
        return self.exit_code

    def leave(self, code: int) -> None:
        self.exit_code = code


def follow_outcomes(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[Outcome],
    code: int | None = None,
) -> tuple[int, list[Claim]]:
    """Exit code of an agent with these outcomes, and the claims with which it led. `code` is its
    exit code as a leader."""
    place = a_place(folder, "host-1")
    config = AgentConfig(place=place, secret=SECRET, term=Term(LAUNCH), devices=1, agent_timeout=1)
    claims: list[Claim] = []

    async def lead(agent: Agent, following: "asyncio.Task[int]", claim: Claim) -> int | None:
        claims.append(claim)
        return code

    def backend_named(name: str) -> AllocationBackend:
        raise AssertionError("no scheduler is asked")

    async def settles(*_: object, **heard: bool) -> Outcome:
        return outcomes.pop(0)

    monkeypatch.setattr("orchestrator.failover.takeover.RETRY_S", 0.01)
    monkeypatch.setattr("orchestrator.failover.takeover._settle", settles)

    async def run() -> int:
        agent: object = Follower(config)
        assert isinstance(agent, Follower)
        following = follow(agent, backend_named, SystemClock(), lead)  # type: ignore[arg-type]
        return await asyncio.wait_for(following, WAIT_S)

    return asyncio.run(run()), claims


def a_claim(run_dir: RunDir, name: str = "the claimant") -> Claim:
    write_fence(run_dir.fence, Fence(leader=name, attempt=1))

    def guard() -> None:
        check_leader(run_dir.fence, name)

    journal = Journal(run_dir.journal, SystemClock(), guard=guard)
    turn = Turn(run_dir.requeue_lock.open("a+"), SystemClock(), "settled")
    assert turn.has_come()
    return Claim(name=name, journal=journal, turn=turn, lost=TakeOver(HOW, host_works=True))


def release(claim: Claim) -> None:
    claim.turn.close()
    with contextlib.closing(contextlib.ExitStack()) as both:
        both.enter_context(claim.journal)


def test_an_agent_exits_with_the_outcome_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follow_outcomes(tmp_path, monkeypatch, ["leave"]) == (exit_codes.LEADER_LOST, [])


def test_an_agent_follows_the_next_leader_until_that_is_lost_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        follow_outcomes(tmp_path, monkeypatch, ["follow", "follow", "leave"])[0]
        == exit_codes.LEADER_LOST
    )


def test_an_agent_with_a_claim_leads_the_job_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = a_claim(a_place(tmp_path).run_dir)
    code, claims = follow_outcomes(tmp_path, monkeypatch, [claim], exit_codes.OK)
    assert (code, claims) == (exit_codes.OK, [claim])
    release(claim)


def test_an_agent_whose_claim_came_second_follows_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = a_claim(a_place(tmp_path).run_dir)
    code, claims = follow_outcomes(tmp_path, monkeypatch, [claim, "leave"], None)
    assert (code, claims) == (exit_codes.LEADER_LOST, [claim])
    release(claim)


# The agent leads


def take_over(
    folder: Path,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    script: Callable[[RunDir, Agent], Awaitable[None]],
    agent_timeout: float = 10.0,
    unheeded: str = "",
) -> int | None:
    """The agent of host-1 takes over during an attempt from the leader on host-0. Returns the exit
    code of the agent."""
    place = a_place(folder, "host-1")
    run_dir = place.run_dir
    with Journal(run_dir.journal, SystemClock()) as journal:
        supervisor = Supervisor(journal)
        supervisor.feed(a_job(run_dir.path, backend="slurm", agent_timeout=agent_timeout))
        began = LeaderStarted(at=time.time(), host="host-0", pid=1, allocation=GRANTED)
        supervisor.feed(began)
        for host in HOSTS:
            supervisor.feed(a_registered(host))
        step = StepReached(at=time.time(), attempt=1, step=1, loss=1.0, tokens_per_second=1.0)
        supervisor.feed(step)
    line = {"attempt": 1, "step": 6, "time": time.time()}
    run_dir.metrics.write_text(f"{json.dumps(line)}\n")
    monkeypatch.setattr(
        "orchestrator.backends.entry.leader.backend_named", lambda *_, **__: backend
    )
    config = AgentConfig(
        place=place,
        secret=SECRET,
        term=Term(LAUNCH),
        devices=1,
        agent_timeout=agent_timeout,
        scheduled=True,
        outlives_leader=True,
    )

    async def run() -> int | None:
        agent = Agent(config, os.environ, SystemClock())
        agent.incarnation, agent.unheeded = "of host-1", unheeded
        following = asyncio.create_task(agent.run())
        claim = a_claim(run_dir)
        leading = asyncio.create_task(
            lead_on(agent, following, claim, "127.0.0.1", os.environ, SystemClock())
        )
        await script(run_dir, agent)
        code = await asyncio.wait_for(leading, WAIT_S)
        if code is None:
            assert not following.done(), "it continues as an agent"
            agent.leave(exit_codes.LEADER_LOST)
        await asyncio.wait_for(following, WAIT_S)
        return code

    return asyncio.run(run())


def a_registered(host: str) -> AgentRegistered:
    return AgentRegistered(
        at=time.time(),
        host=host,
        address="127.0.0.1",
        devices=1,
        pid=1,
        incarnation=f"of {host}",
    )


def events(run_dir: RunDir) -> list[object]:
    return [entry.event for entry in read(run_dir.journal)]


def is_requeued(backend: FakeBackend) -> Callable[[], bool]:
    return lambda: bool(backend.requeued)


def test_the_new_leader_starts_an_agent_on_the_old_leaders_host_and_keeps_its_own_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GrantingBackend(cause="requeued")

    async def script(run_dir: RunDir, agent: Agent) -> None:
        await until(lambda: backend.replaced, "an agent for host-0")
        await until(lambda: is_free(run_dir.requeue_lock), "the release of the turn")
        await until(lambda: leader_of(run_dir, Term(LAUNCH)), "the address of the leader")
        own = (AgentRegistered, "host-1", "of host-1")

        def registered_again() -> bool:
            again = [e for e in events(run_dir) if isinstance(e, AgentRegistered)][2:]
            return any((type(e), e.host, e.incarnation) == own for e in again)

        await until(
            registered_again, "the registration of its own agent, with the same incarnation"
        )
        signal_ourselves(signal.SIGUSR2)  # the new leader handles the signals of the scheduler

    assert take_over(tmp_path, backend, monkeypatch, script) == exit_codes.REQUEUED
    assert backend.replaced == ["host-0"]
    run_dir = a_place(tmp_path).run_dir
    run = fold(entry.event for entry in read(run_dir.journal))
    (incident,) = run.history.incidents
    assert (incident.kind, incident.culprit) == ("leader-lost", NOBODY)
    assert incident.cause.endswith(HOW)
    assert (incident.step, incident.saved) == (6, 0), (
        "from the metrics, which are newer than the journal"
    )
    assert (run.scheduler.leader, run.scheduler.left_out) == ("host-1", ())
    assert backend.requeued == [()], "no host is excluded"
    assert not has_writer(run_dir.journal)


def test_the_new_leader_handles_a_signal_that_the_old_leader_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GrantingBackend(cause="preempted")

    async def script(run_dir: RunDir, agent: Agent) -> None:
        await until(is_requeued(backend), "a requeue")

    assert (
        take_over(tmp_path, backend, monkeypatch, script, unheeded="SIGTERM") == exit_codes.REQUEUED
    )
    found = events(a_place(tmp_path).run_dir)
    (began,) = [at for at, e in enumerate(found) if isinstance(e, LeaderStarted) and e.former]
    requests = [at for at, e in enumerate(found) if isinstance(e, LeaveAsked)]
    assert [found[at] for at in requests][-1].cause == "preempted"  # type: ignore[attr-defined]
    assert min(requests) > began


def test_the_job_is_requeued_if_no_agent_can_start_on_the_old_leaders_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = GrantingBackend(broken=True)

    async def script(run_dir: RunDir, agent: Agent) -> None:
        await until(is_requeued(backend), "a requeue")

    assert take_over(tmp_path, backend, monkeypatch, script) == exit_codes.REQUEUED
    assert backend.requeued == [("host-0",)]


def test_an_agent_that_does_not_connect_to_the_new_leader_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was registered with the old leader."""
    three = Allocation(id="7", restarts=0, hosts=(*HOSTS, "host-2"))
    monkeypatch.setattr("tests.failover.test_takeover.GRANTED", three)
    monkeypatch.setattr("tests.failover.test_takeover.HOSTS", three.hosts)
    backend = GrantingBackend(cause="requeued")

    async def script(run_dir: RunDir, agent: Agent) -> None:
        def lost() -> list[AgentLost]:
            return [e for e in events(run_dir) if isinstance(e, AgentLost)]

        await until(lost, "the loss of its agent")
        assert [one.host for one in lost()] == ["host-2"]
        assert "did not connect to the new leader" in lost()[0].why
        await until(lambda: "host-2" in backend.replaced, "another agent there")
        signal_ourselves(signal.SIGTERM)

    assert take_over(tmp_path, backend, monkeypatch, script, 2.0) == exit_codes.REQUEUED


def test_of_two_agents_with_a_claim_the_one_that_is_not_in_the_fence_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without file locks two agents may have a claim. The second changes nothing and follows."""
    backend = GrantingBackend()

    async def script(run_dir: RunDir, agent: Agent) -> None:
        write_fence(run_dir.fence, Fence(leader="the other agent", attempt=1))

    assert take_over(tmp_path, backend, monkeypatch, script) is None
    run_dir = a_place(tmp_path).run_dir
    started = [e for e in events(run_dir) if isinstance(e, LeaderStarted)]
    assert [event.host for event in started] == ["host-0"]
    assert read_fence(run_dir.fence) == Fence(leader="the other agent", attempt=1)
    assert backend.replaced == []
    assert not has_writer(run_dir.journal), "the other agent can write it"

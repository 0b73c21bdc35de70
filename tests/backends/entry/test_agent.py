"""The entry of an agent process: who may be the agent of a host, and how leader and agent end."""

import asyncio
import fcntl
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import host_strikes
from orchestrator.agent.agent import WARNINGS, Agent, AgentConfig
from orchestrator.backends.entry.agent import _hold_host, main
from orchestrator.backends.entry.leader import lead as lead_and_follow
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, LaunchPlan
from orchestrator.contract.messages.events import (
    AgentRegistered,
    CancelRequested,
    Event,
    HostLeaving,
    LeaderStarted,
    LeaveAsked,
)
from orchestrator.errors import CannotLead
from orchestrator.job.transitions import fold
from orchestrator.journal.journal import Journal, has_writer, read
from orchestrator.journal.supervisor import Supervisor
from orchestrator.posix.fd_limit import AT_MOST
from orchestrator.posix.locks import is_free
from orchestrator.system import SystemClock
from tests.agent.world import (
    LAUNCH,
    RUNS,
    SECRET,
    SECRET_TEXT,
    WAIT_S,
    FakeBackend,
    TurnedClock,
    a_job,
    a_place,
    signal_ourselves,
    until,
)

WORDS = (
    *("--host=host-0", "--address=127.0.0.1", "--launch=1", "--devices=1"),
    "--agent-timeout=1",
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    return run_dir


def test_the_agent_of_a_host_is_alone_and_says_who_it_is(run_dir: RunDir) -> None:
    lock = run_dir.agent_lock("host-0")
    lock.write_text("99999999 of a former agent")
    assert _hold_host(run_dir, "host-0", TurnedClock())
    assert lock.read_text() == str(os.getpid())
    assert has_writer(lock)
    assert not _hold_host(run_dir, "host-0", TurnedClock())
    assert _hold_host(run_dir, "host-1", TurnedClock())


def test_who_waits_for_former_ranks_can_be_found_in_the_lock(run_dir: RunDir) -> None:
    ranks = os.open(run_dir.ranks_lock("host-0"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(ranks, fcntl.LOCK_SH)
    lock = run_dir.agent_lock("host-0")

    class Looks(TurnedClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            assert lock.read_text() == str(os.getpid())

    assert not _hold_host(run_dir, "host-0", Looks())
    os.close(ranks)


@pytest.mark.process
def test_what_a_former_agents_rank_left_running_is_killed(run_dir: RunDir) -> None:
    ranks = run_dir.ranks_lock("host-0")
    fd = os.open(ranks, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    orphan = subprocess.Popen(["sleep", "600"], pass_fds=[fd])
    os.close(fd)
    assert not is_free(ranks)

    class Reaps(TurnedClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.time > TurnedClock().time + 6.0:
                orphan.wait(WAIT_S)

    assert _hold_host(run_dir, "host-0", Reaps())
    assert orphan.wait(WAIT_S) == -signal.SIGKILL


def test_an_agent_whose_host_is_taken_is_not_admitted(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.backends.entry.agent.LOCK_WAIT_S", 0.0)
    assert _hold_host(run_dir, "host-0", TurnedClock())
    assert main([f"--run-dir={run_dir.path}", *WORDS], {}) == exit_codes.NOT_ADMITTED


def test_an_agent_may_open_as_many_files_as_its_host_allows(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so may all that it starts: Slurm hands on what a login node has, 1,024 by default."""
    monkeypatch.setattr("orchestrator.backends.entry.agent.LOCK_WAIT_S", 0.0)
    assert _hold_host(run_dir, "host-0", TurnedClock())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    main([f"--run-dir={run_dir.path}", *WORDS], {})
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, AT_MOST), hard)


def lead(
    folder: Path,
    script: Callable[[RunDir], Awaitable[None]] | None,
    socket: str = "",
    scheduled: bool = False,
) -> int:
    """Lead a job of two hosts of which only the leader's own comes."""
    place = a_place(folder)
    if socket:
        place = replace(place, socket=Path(socket))
    with Journal(place.run_dir.journal, SystemClock()) as journal:
        journal.append(a_job(place.run_dir.path))
    config = AgentConfig(
        place=place, secret=SECRET, term=Term(LAUNCH), devices=1, agent_timeout=10.0
    )

    async def run() -> int:
        leading = asyncio.create_task(
            lead_and_follow(config, "127.0.0.1", scheduled, os.environ, SystemClock())
        )
        if script is not None:
            await script(place.run_dir)
        return await asyncio.wait_for(leading, WAIT_S)

    return asyncio.run(run())


def test_sigterm_to_the_leader_cancels_the_job(tmp_path: Path) -> None:
    async def terminate(run_dir: RunDir) -> None:
        def came() -> bool:
            return any(isinstance(e.event, AgentRegistered) for e in read(run_dir.journal))

        await until(came, "its own agent")
        signal_ourselves(signal.SIGTERM)

    assert lead(tmp_path, terminate) == exit_codes.OK
    run_dir = RunDir(tmp_path / "job")
    run = fold(entry.event for entry in read(run_dir.journal))
    assert (run.state, run.interruption.cancelled_by) == ("CANCELLED", "SIGTERM to the leader")
    assert json.loads(run_dir.leader.read_text())["over"]
    assert not has_writer(run_dir.journal)


@pytest.mark.parametrize("number", WARNINGS)
def test_what_a_scheduler_signals_is_the_leaders_to_decide(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def warn(run_dir: RunDir) -> None:
        def came() -> bool:
            return any(isinstance(e.event, AgentRegistered) for e in read(run_dir.journal))

        await until(came, "its own agent")
        signal_ourselves(number)

    assert lead(tmp_path, warn, scheduled=True) == exit_codes.OK
    found = [entry.event for entry in read(RunDir(tmp_path / "job").journal)]
    asked = [event for event in found if isinstance(event, LeaveAsked)]
    assert [(event.cause, event.words) for event in asked] == [
        (None, number.name),
        ("cancelled", number.name),
    ], "the backend was asked why"
    assert fold(found).state == "CANCELLED"


def a_follower(run_dir: RunDir, *words: str) -> int:
    """An agent of host-1 that does not lead."""
    run_dir.token.write_text(SECRET_TEXT)
    host = ["--host=host-1", "--address=127.0.0.1", f"--launch={LAUNCH}", "--devices=1"]
    return main([f"--run-dir={run_dir.path}", *host, "--agent-timeout=1", *words], {})


@pytest.mark.parametrize(("words", "left"), [((), True), (("--restarts=0",), False)])
def test_what_a_scheduler_signals_a_follower_leaves_to_the_leader(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], left: bool
) -> None:
    codes: list[int | None] = []

    async def signalled(agent: Agent) -> int:
        for number in WARNINGS if words else (signal.SIGTERM,):
            signal_ourselves(number)
        if left:
            await until(lambda: agent.exit_code is not None, "the signal")
        else:
            await asyncio.sleep(0.05)
        codes.append(agent.exit_code)
        return exit_codes.OK

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", signalled)
    assert a_follower(run_dir, *words) == exit_codes.OK
    assert codes == [exit_codes.LEADER_LOST if left else None]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The backend of an agent whose leader is gone."""
    found = FakeBackend()

    async def lost(agent: Agent) -> int:
        if not agent.config.outlives_leader:
            return exit_codes.LEADER_LOST
        agent.alone.set()
        await until(lambda: agent.exit_code is not None, "what becomes of the job")
        assert agent.exit_code is not None
        return agent.exit_code

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", lost)
    monkeypatch.setattr("orchestrator.backends.entry.agent.backend_named", lambda *_, **__: found)
    return found


def write(run_dir: RunDir, *happened: Event) -> None:
    with Journal(run_dir.journal, SystemClock()) as journal:
        supervisor = Supervisor(journal)
        for event in (
            a_job(run_dir.path),
            LeaderStarted(at=time.time(), host="host-0", pid=1),
            *happened,
        ):
            supervisor.feed(event)


def test_where_hosts_are_replaced_a_follower_tells_the_leader_of_its_own_end(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def signalled(agent: Agent) -> int:
        signal_ourselves(signal.SIGTERM)
        await until(lambda: agent.outbox, "a report")
        assert agent.outbox[0] == HostLeaving(host="host-1", why="SIGTERM")
        return exit_codes.LEADER_LOST

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", signalled)
    assert a_follower(run_dir, "--restarts=0", "--patience=60") == exit_codes.LEADER_LOST


@pytest.mark.parametrize(("turn", "sees"), [(1, True), (10_000, False)])
def test_a_follower_whose_turn_it_is_sees_that_the_leader_is_replaced(
    run_dir: RunDir, queue: FakeBackend, monkeypatch: pytest.MonkeyPatch, turn: int, sees: bool
) -> None:
    write(run_dir)
    monkeypatch.setattr("orchestrator.failover.leader_lost.SEE_S", 0.01)

    async def alone(agent: Agent) -> int:
        monkeypatch.setattr(agent, "silent_for", lambda: 1.5)  # of an agent_timeout of 1
        if sees:
            await until(lambda: queue.revived, "the backend being asked")
        else:
            await asyncio.sleep(0.1)
        return exit_codes.LEADER_LOST

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", alone)
    words = ("--restarts=0", "--patience=60", f"--turn={turn}")
    assert a_follower(run_dir, *words) == exit_codes.LEADER_LOST
    assert set(queue.revived) == ({1.5} if sees else set())
    assert queue.requeued == [], "the scheduler starts it again by itself"


def test_who_lost_the_leader_with_its_host_has_the_job_queued_again_without_it(
    run_dir: RunDir, queue: FakeBackend
) -> None:
    granted = Allocation(id="7", restarts=1, hosts=("host-0", "host-1"))
    write(run_dir, LeaderStarted(at=time.time(), host="host-0", pid=1, allocation=granted))
    queue.own = replace(RUNS, given_up={"host-0": "Slurm reports it as DOWN"})
    assert a_follower(run_dir, "--restarts=1") == exit_codes.LEADER_LOST
    assert queue.requeued == [("host-0",)]


def test_without_a_scheduler_nobody_is_asked(run_dir: RunDir, queue: FakeBackend) -> None:
    write(run_dir)
    assert a_follower(run_dir) == exit_codes.LEADER_LOST
    assert queue.requeued == []


def test_a_job_that_has_ended_is_not_queued_again(run_dir: RunDir, queue: FakeBackend) -> None:
    write(run_dir, CancelRequested(at=time.time(), by="me"))
    assert fold(entry.event for entry in read(run_dir.journal)).ending == "CANCELLED"
    assert a_follower(run_dir, "--restarts=0") == exit_codes.LEADER_LOST
    assert queue.requeued == []


def test_a_leader_whose_own_agent_cannot_begin_does_not_wait_for_the_others(
    tmp_path: Path,
) -> None:
    with pytest.raises(OSError, match="too long"):
        lead(tmp_path, None, socket=str(tmp_path / ("x" * 120)))


def test_a_leader_hears_which_hosts_a_person_has_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Granting(FakeBackend):
        def allocation(self, launch: LaunchPlan) -> Allocation:
            return Allocation(id="7", restarts=0, hosts=launch.hosts)

        def cluster(self) -> str:
            return "tb"

    async def end(run_dir: RunDir) -> None:
        def leads() -> bool:
            return any(isinstance(e.event, LeaderStarted) for e in read(run_dir.journal))

        await until(leads, "the leader")
        signal_ourselves(signal.SIGTERM)

    monkeypatch.setattr(
        "orchestrator.backends.entry.leader.backend_named", lambda *_, **__: Granting()
    )
    cleared = host_strikes.Cleared(at=5.0, host="host-1", by="ada")
    host_strikes.record(host_strikes.path_of(tmp_path, "tb"), cleared)
    lead(tmp_path, end)
    entries = read(RunDir(tmp_path / "job").journal)
    (started,) = [e.event for e in entries if isinstance(e.event, LeaderStarted)]
    assert started.cleared == {"host-1": 5.0}


def test_a_leader_that_cannot_ask_its_scheduler_ends_the_job_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(FakeBackend):
        def allocation(self, launch: LaunchPlan) -> Allocation:
            raise CannotLead("no scontrol in this image", fix="mount it")

    monkeypatch.setattr("orchestrator.backends.entry.leader.backend_named", lambda *_, **__: Deaf())
    assert lead(tmp_path, None, scheduled=True) == exit_codes.FAILED
    run_dir = RunDir(tmp_path / "job")
    run = fold(entry.event for entry in read(run_dir.journal))
    assert (run.state, run.stage.reason) == ("FAILED", "no scontrol in this image; mount it")
    assert not has_writer(run_dir.journal)


def test_a_leader_whose_own_agent_leaves_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(agent: object) -> int:
        return exit_codes.LEADER_LOST

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", gone)
    assert lead(tmp_path, None) == exit_codes.FAILED

"""Entry point of an agent process: the lock of a host, exit codes, signals and failover."""

import asyncio
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator import host_strikes
from orchestrator.agent.agent import WARNINGS, Agent, AgentConfig
from orchestrator.backends.entry.agent import Held, _hold_host, main
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
from orchestrator.failover.journal_watch import Following, Seen
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

AGENT_ARGS = (
    *("--host=host-0", "--address=127.0.0.1", "--launch=1", "--devices=1"),
    "--agent-timeout=1",
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    return run_dir


def test_only_one_agent_holds_a_host_and_its_lock_has_its_pid(run_dir: RunDir) -> None:
    lock = run_dir.agent_lock("host-0")
    lock.write_text("99999999 of an old agent")
    assert _hold_host(run_dir, "host-0", TurnedClock())
    assert lock.read_text() == str(os.getpid())
    assert has_writer(lock)
    assert not _hold_host(run_dir, "host-0", TurnedClock())
    assert _hold_host(run_dir, "host-1", TurnedClock())


def test_an_agent_may_get_its_lock_from_the_process_that_starts_it(run_dir: RunDir) -> None:
    lock = run_dir.agent_lock("host-0")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, b"99999999 of the starting process")
    os.set_inheritable(fd, True)
    assert not _hold_host(run_dir, "host-0", TurnedClock())
    assert _hold_host(run_dir, "host-0", TurnedClock(), fd)
    assert lock.read_text() == str(os.getpid())
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_the_lock_has_the_pid_of_an_agent_that_waits_for_old_ranks(run_dir: RunDir) -> None:
    ranks = os.open(run_dir.ranks_lock("host-0"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(ranks, fcntl.LOCK_SH)
    lock = run_dir.agent_lock("host-0")

    class ReadsLockOnSleep(TurnedClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            assert lock.read_text() == str(os.getpid())

    assert not _hold_host(run_dir, "host-0", ReadsLockOnSleep())
    os.close(ranks)


@pytest.mark.process
@pytest.mark.parametrize(("launch", "stopped"), [(1, True), (1, False), (2, True)])
def test_only_a_stopped_agent_of_the_same_launch_gives_way_to_the_next(
    run_dir: RunDir, launch: int, *, stopped: bool
) -> None:
    """The next agent would wait for its lock longer than the leader waits for the next agent. An
    agent that runs may come back, and one of another launch is not the one to be replaced."""
    lock = run_dir.agent_lock("host-0")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)", f"--launch={launch}"]
    former = subprocess.Popen(sleeps, pass_fds=(fd,))
    os.close(fd)  # only `former` holds it now
    lock.write_text(str(former.pid))
    try:
        if stopped:
            former.send_signal(signal.SIGSTOP)
            os.waitpid(former.pid, os.WUNTRACED)  # returns when it has stopped
        replaced = launch == 1 and stopped
        held = _hold_host(run_dir, "host-0", HurriedClock(), launch=1)
        assert held == (Held(former_stopped=True) if replaced else None)
        assert (former.poll() is not None) == replaced
    finally:
        former.kill()
        former.wait()


class HurriedClock(TurnedClock):
    """Gives other processes some real time at each sleep."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        time.sleep(0.001)


@pytest.mark.process
def test_programs_that_an_old_rank_started_are_ended_and_no_others(run_dir: RunDir) -> None:
    ours = {"NDCTL_RUN_DIR": str(run_dir.path), "NDCTL_HOST": "host-0", "NDCTL_TORCHRUN_PID": "7"}
    others: list[dict[str, str]] = [
        {**ours, "NDCTL_HOST": "host-1"},
        {**ours, "NDCTL_RUN_DIR": f"{run_dir.path}-2"},
        {name: value for name, value in ours.items() if name != "NDCTL_TORCHRUN_PID"},
    ]
    left, *stay = (subprocess.Popen(["sleep", "600"], env=environ) for environ in [ours, *others])
    try:
        assert _hold_host(run_dir, "host-0", SystemClock())
        assert left.wait(WAIT_S) == -signal.SIGTERM
        assert [one.poll() for one in stay] == [None] * len(others)
    finally:
        for one in [left, *stay]:
            one.kill()
            one.wait()


@pytest.mark.process
def test_processes_of_an_old_rank_are_killed(run_dir: RunDir) -> None:
    ranks = run_dir.ranks_lock("host-0")
    fd = os.open(ranks, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    ignores = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    command = [sys.executable, "-c", ignores]
    orphan = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE)
    assert orphan.stdout is not None
    orphan.stdout.readline()
    os.close(fd)
    assert not is_free(ranks)

    class ReapsOnSleep(TurnedClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.time > TurnedClock().time + 6.0:
                orphan.wait(WAIT_S)

    assert _hold_host(run_dir, "host-0", ReapsOnSleep())
    assert orphan.wait(WAIT_S) == -signal.SIGKILL
    orphan.stdout.close()


def test_a_second_agent_of_a_host_exits_as_not_admitted(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.backends.entry.agent.LOCK_WAIT_S", 0.0)
    assert _hold_host(run_dir, "host-0", TurnedClock())
    assert main([f"--run-dir={run_dir.path}", *AGENT_ARGS], {}) == exit_codes.NOT_ADMITTED


def test_an_agent_raises_its_open_file_limit(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm passes on the soft limit of the login node, which is 1,024 by default."""
    monkeypatch.setattr("orchestrator.backends.entry.agent.LOCK_WAIT_S", 0.0)
    assert _hold_host(run_dir, "host-0", TurnedClock())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    main([f"--run-dir={run_dir.path}", *AGENT_ARGS], {})
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, AT_MOST), hard)


def lead(
    folder: Path,
    script: Callable[[RunDir], Awaitable[None]] | None,
    socket: str = "",
    scheduled: bool = False,
) -> int:
    """Lead a job of two hosts. Only the leader's own agent registers."""
    place = a_place(folder)
    if socket:
        place = replace(place, socket=Path(socket))
    with Journal(place.run_dir.journal, SystemClock()) as journal:
        journal.append(a_job(place.run_dir.path))
    config = AgentConfig(
        place=place,
        secret=SECRET,
        term=Term(LAUNCH),
        devices=1,
        agent_timeout=10.0,
        scheduled=scheduled,
    )

    async def run() -> int:
        leading = asyncio.create_task(
            lead_and_follow(config, "127.0.0.1", os.environ, SystemClock())
        )
        if script is not None:
            await script(place.run_dir)
        return await asyncio.wait_for(leading, WAIT_S)

    return asyncio.run(run())


def test_sigterm_to_the_leader_cancels_the_job(tmp_path: Path) -> None:
    async def terminate(run_dir: RunDir) -> None:
        def agent_registered() -> bool:
            return any(isinstance(e.event, AgentRegistered) for e in read(run_dir.journal))

        await until(agent_registered, "its own agent")
        signal_ourselves(signal.SIGTERM)

    assert lead(tmp_path, terminate) == exit_codes.OK
    run_dir = RunDir(tmp_path / "job")
    run = fold(entry.event for entry in read(run_dir.journal))
    assert (run.state, run.interruption.cancelled_by) == ("CANCELLED", "SIGTERM to the leader")
    assert json.loads(run_dir.leader.read_text())["over"]
    assert not has_writer(run_dir.journal)


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_signal_makes_the_leader_ask_its_backend_for_the_cause(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def warn(run_dir: RunDir) -> None:
        def agent_registered() -> bool:
            return any(isinstance(e.event, AgentRegistered) for e in read(run_dir.journal))

        await until(agent_registered, "its own agent")
        signal_ourselves(number)

    assert lead(tmp_path, warn, scheduled=True) == exit_codes.OK
    found = [entry.event for entry in read(RunDir(tmp_path / "job").journal)]
    asked = [event for event in found if isinstance(event, LeaveAsked)]
    assert [(event.cause, event.words) for event in asked] == [
        (None, number.name),
        ("cancelled", number.name),
    ], "the backend must be asked for the cause"
    assert fold(found).state == "CANCELLED"


def run_follower(run_dir: RunDir, *more_args: str) -> int:
    """Run an agent of host-1 that does not lead; returns its exit code."""
    run_dir.token.write_text(SECRET_TEXT)
    host = ["--host=host-1", "--address=127.0.0.1", f"--launch={LAUNCH}", "--devices=1"]
    return main([f"--run-dir={run_dir.path}", *host, "--agent-timeout=1", *more_args], {})


@pytest.mark.parametrize(("more_args", "exits"), [((), True), (("--restarts=0",), False)])
def test_a_follower_in_an_allocation_ignores_signals_of_the_scheduler(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, more_args: tuple[str, ...], exits: bool
) -> None:
    codes: list[int | None] = []

    async def receive_signals(agent: Agent) -> int:
        for number in WARNINGS if more_args else (signal.SIGTERM,):
            signal_ourselves(number)
        if exits:
            await until(lambda: agent.exit_code is not None, "the signal")
        else:
            await asyncio.sleep(0.05)
        codes.append(agent.exit_code)
        return exit_codes.OK

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", receive_signals)
    assert run_follower(run_dir, *more_args) == exit_codes.OK
    assert codes == [exit_codes.LEADER_LOST if exits else None]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """Backend of a follower that has lost its leader."""
    found = FakeBackend()

    async def lose_leader(agent: Agent) -> int:
        if not agent.config.outlives_leader:
            return exit_codes.LEADER_LOST
        agent.alone.set()
        await until(lambda: agent.exit_code is not None, "the decision about the job")
        assert agent.exit_code is not None
        return agent.exit_code

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", lose_leader)
    monkeypatch.setattr("orchestrator.backends.entry.agent.backend_named", lambda *_, **__: found)
    return found


def write_journal(run_dir: RunDir, *more_events: Event) -> None:
    with Journal(run_dir.journal, SystemClock()) as journal:
        supervisor = Supervisor(journal)
        for event in (
            a_job(run_dir.path),
            LeaderStarted(at=time.time(), host="host-0", pid=1),
            *more_events,
        ):
            supervisor.feed(event)


def test_a_follower_reports_sigterm_to_the_leader_if_hosts_are_replaced(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def receive_signals(agent: Agent) -> int:
        signal_ourselves(signal.SIGTERM)
        await until(lambda: agent.outbox, "a report")
        assert agent.outbox[0] == HostLeaving(host="host-1", why="SIGTERM")
        return exit_codes.LEADER_LOST

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", receive_signals)
    assert run_follower(run_dir, "--restarts=0", "--patience=60") == exit_codes.LEADER_LOST


@pytest.mark.parametrize(("turn", "sees"), [(1, True), (10_000, False)])
def test_a_follower_asks_for_a_new_leader_when_its_turn_comes(
    run_dir: RunDir, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, turn: int, sees: bool
) -> None:
    write_journal(run_dir)
    monkeypatch.setattr("orchestrator.failover.leader_lost.SEE_S", 0.01)

    async def hear_no_leader(agent: Agent) -> int:
        monkeypatch.setattr(agent, "silent_for", lambda: 1.5)  # more than the agent_timeout of 1 s
        if sees:
            await until(lambda: backend.revived, "the backend being asked")
        else:
            await asyncio.sleep(0.1)
        return exit_codes.LEADER_LOST

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", hear_no_leader)
    more_args = ("--restarts=0", "--patience=60", f"--turn={turn}")
    assert run_follower(run_dir, *more_args) == exit_codes.LEADER_LOST
    assert set(backend.revived) == ({1.5} if sees else set())
    assert backend.requeued == [], "the scheduler recreates the leader's pod by itself"


def test_a_follower_replaces_the_leader_after_short_storage_errors(
    run_dir: RunDir, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(run_dir)
    monkeypatch.setattr("orchestrator.failover.leader_lost.SEE_S", 0.01)
    monkeypatch.setattr("orchestrator.posix.retry_io.RETRY_S", 0.01)
    real_look = Following.look
    failed: list[bool] = []

    def fail_three_times(following: Following) -> Seen:
        if len(failed) < 3:
            failed.append(True)
            raise OSError(errno.ESTALE, "stale file handle")
        return real_look(following)

    async def hear_no_leader(agent: Agent) -> int:
        monkeypatch.setattr(agent, "silent_for", lambda: 1.5)  # more than the agent_timeout of 1 s
        await until(lambda: backend.revived, "the backend being asked")
        return exit_codes.LEADER_LOST

    monkeypatch.setattr(Following, "look", fail_three_times)
    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", hear_no_leader)
    assert run_follower(run_dir, "--restarts=0", "--patience=60") == exit_codes.LEADER_LOST
    assert len(failed) == 3


def test_a_follower_requeues_the_job_without_the_lost_leaders_host(
    run_dir: RunDir, backend: FakeBackend
) -> None:
    granted = Allocation(id="7", restarts=1, hosts=("host-0", "host-1"))
    write_journal(run_dir, LeaderStarted(at=time.time(), host="host-0", pid=1, allocation=granted))
    backend.own = replace(RUNS, given_up={"host-0": "Slurm reports it as DOWN"})
    assert run_follower(run_dir, "--restarts=1") == exit_codes.LEADER_LOST
    assert backend.requeued == [("host-0",)]


def test_a_job_that_has_ended_is_not_requeued(run_dir: RunDir, backend: FakeBackend) -> None:
    write_journal(run_dir, CancelRequested(at=time.time(), by="me"))
    assert fold(entry.event for entry in read(run_dir.journal)).ending == "CANCELLED"
    assert run_follower(run_dir, "--restarts=0") == exit_codes.LEADER_LOST
    assert backend.requeued == []


def test_a_leader_fails_at_once_if_its_own_agent_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        lead(tmp_path, None, socket=str(tmp_path / ("x" * 120)))


def test_a_leader_reads_which_hosts_a_user_has_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GrantingBackend(FakeBackend):
        def allocation(self, launch: LaunchPlan) -> Allocation:
            return Allocation(id="7", restarts=0, hosts=launch.hosts)

        def cluster(self) -> str:
            return "tb"

    async def end(run_dir: RunDir) -> None:
        def leader_started() -> bool:
            return any(isinstance(e.event, LeaderStarted) for e in read(run_dir.journal))

        await until(leader_started, "the leader")
        signal_ourselves(signal.SIGTERM)

    monkeypatch.setattr(
        "orchestrator.backends.entry.leader.backend_named", lambda *_, **__: GrantingBackend()
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
    class BackendCannotLead(FakeBackend):
        def allocation(self, launch: LaunchPlan) -> Allocation:
            raise CannotLead("no scontrol in this image", fix="mount it")

    monkeypatch.setattr(
        "orchestrator.backends.entry.leader.backend_named", lambda *_, **__: BackendCannotLead()
    )
    assert lead(tmp_path, None, scheduled=True) == exit_codes.FAILED
    run_dir = RunDir(tmp_path / "job")
    run = fold(entry.event for entry in read(run_dir.journal))
    assert (run.state, run.stage.reason) == ("FAILED", "no scontrol in this image; mount it")
    assert not has_writer(run_dir.journal)


def test_a_leader_fails_if_its_own_agent_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose_leader(agent: object) -> int:
        return exit_codes.LEADER_LOST

    monkeypatch.setattr("orchestrator.agent.agent.Agent.run", lose_leader)
    assert lead(tmp_path, None) == exit_codes.FAILED

"""Attempts with real rank watchers, a fake torchrun and a trainer that imports nothing."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from orchestrator.agent.attempt import Attempt, keepers_killed
from orchestrator.agent.evidence.rank_evidence import parent_of, process_state
from orchestrator.agent.processes.fork_server import Ended
from orchestrator.agent.processes.fork_server_client import Running, Standby
from orchestrator.agent.rank_socket import listen
from orchestrator.contract.messages.events import HostStopped, RankError, RankExited
from orchestrator.contract.messages.rank_messages import Beat, RankRaised, RankStarted
from orchestrator.posix.locks import is_free
from orchestrator.seams import Clock
from orchestrator.system import SystemClock
from tests.agent.world import (
    IGNORES_TERM,
    SLEEPS,
    WAIT_S,
    TurnedClock,
    a_place,
    a_start,
    is_gone,
    kill,
    until,
    wait_for,
)
from tests.nfs_locks import byte_ranges
from tests.nfs_locks.byte_ranges import flock

LOCKS_AS_ON_NFS = Path(byte_ranges.__file__).parent

Script = Callable[[Attempt], Awaitable[None]]
Outcome = tuple[list[RankExited], HostStopped]


def run_attempt(
    folder: Path,
    program: str,
    script: Script,
    ranks: int = 1,
    clock: Clock | None = None,
    steps: int = 0,
    stop_grace: float = 0.0,
    **environ: str,
) -> tuple[list[RankExited], Outcome]:
    """Run an attempt with `script` at the same time; returns reported exits and the outcome."""

    async def run() -> tuple[list[RankExited], Outcome]:
        place = a_place(folder)
        start = replace(a_start(place, program, ranks), steps=steps, stop_grace=stop_grace)
        attempt = Attempt(start, place, clock or SystemClock())
        standby = Standby(place, os.environ)
        reports: list[RankExited] = []
        transport = await listen(
            place.socket, lambda d: reports.extend(filter(None, [attempt.hear(d)]))
        )
        try:
            await attempt.launch(standby, {**os.environ, **environ})
            waiting = asyncio.create_task(attempt.wait())
            await script(attempt)
            outcome = await asyncio.wait_for(waiting, WAIT_S)
        finally:
            attempt.kill()
            transport.close()
        assert is_free(place.lock)
        assert all(is_gone(record.pid) for record in attempt.ranks.values())
        return reports, outcome

    return asyncio.run(run())


async def do_nothing(attempt: Attempt) -> None:
    pass


def ranks_started(count: int) -> Script:
    async def script(attempt: Attempt) -> None:
        await until(lambda: len(attempt.ranks) == count, f"{count} ranks")

    return script


REPORTS_STEP = (
    "import os, struct; os.write(int(os.environ['NDCTL_PROGRESS_FD']), struct.pack('<q', {}))"
)


@pytest.mark.process
def test_a_rank_that_exits_with_0_before_the_last_step_has_failed(tmp_path: Path) -> None:
    program = REPORTS_STEP.format(7)
    reports, (unseen, stopped) = run_attempt(tmp_path, program, do_nothing, steps=10)
    (exited,) = reports
    assert (exited.exit_code, exited.step, exited.stopped) == (0, 7, False)
    assert (unseen, stopped.finished) == ([], False)


@pytest.mark.process
def test_the_last_step_counts_even_without_a_heartbeat(tmp_path: Path) -> None:
    program = REPORTS_STEP.format(10)
    reports, (unseen, stopped) = run_attempt(tmp_path, program, do_nothing, ranks=2, steps=10)
    assert (reports, unseen, stopped.finished) == ([], [], True)


@pytest.mark.process
def test_an_attempt_whose_ranks_all_exit_with_0_is_finished(tmp_path: Path) -> None:
    reports, (unseen, stopped) = run_attempt(tmp_path, "print('trained')", do_nothing, ranks=2)
    assert (reports, unseen) == ([], [])
    assert stopped == HostStopped(attempt=1, host="host-0", finished=True)
    logs = tmp_path / "job" / "logs" / "attempt-1" / "host-0"
    assert (logs / "rank-1.log").read_text() == "trained\n"


@pytest.mark.process
def test_the_end_of_an_attempt_is_detected_on_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setenv("PYTHONPATH", str(LOCKS_AS_ON_NFS), prepend=os.pathsep)

    async def while_it_runs(attempt: Attempt) -> None:
        await until(lambda: len(attempt.ranks) == 1, "the rank")
        assert not is_free(attempt.place.lock)
        kill(attempt.ranks[0].pid)

    _, (unseen, stopped) = run_attempt(tmp_path, SLEEPS, while_it_runs)
    assert (unseen, stopped.finished) == ([], False)
    _, (unseen, stopped) = run_attempt(tmp_path, "print('trained')", do_nothing, ranks=2)
    assert (unseen, stopped.finished) == ([], True)


@pytest.mark.process
def test_a_failed_rank_is_reported_and_its_peers_are_stopped(tmp_path: Path) -> None:
    program = """
import os, pathlib, sys, time
up = pathlib.Path(sys.argv[0] + ".up")
if os.environ["RANK"] == "0":
    up.touch()
    time.sleep(600)
while not up.exists():
    time.sleep(0.01)
sys.exit(9)
"""
    reports, (unseen, stopped) = run_attempt(tmp_path, program, do_nothing, ranks=2)
    first, second = reports
    assert (first.rank, first.exit_code, first.stopped) == (1, 9, False)
    assert (second.rank, second.signal) == (0, signal.SIGTERM), "torchrun stops it"
    assert unseen == []
    assert not stopped.finished
    assert stopped.why.startswith("torchrun ended with code 1")


@pytest.mark.process
def test_stop_sends_sigterm_and_kills_a_rank_that_ignores_it(tmp_path: Path) -> None:
    clock = TurnedClock()

    async def stop(attempt: Attempt) -> None:
        await ranks_started(2)(attempt)
        log = attempt.log_dir / "rank-0.log"
        await until(
            lambda: log.exists() and log.read_text() == "ready\n", "the rank that ignores SIGTERM"
        )
        stopping = asyncio.create_task(attempt.stop(5.0))
        await until(lambda: attempt.ranks[1].ended, "the end of the other rank")
        assert not attempt.ranks[0].ended
        clock.sleep(5.0)
        await stopping

    program = f"import os\nif os.environ['RANK'] == '1':\n    {SLEEPS}\n{IGNORES_TERM}"
    reports, (unseen, stopped) = run_attempt(tmp_path, program, stop, ranks=2, clock=clock)
    ends = {report.rank: report for report in (*reports, *unseen)}
    assert ends[1].signal == signal.SIGTERM
    # The exit of the killed rank may be unseen.
    assert ends[0].signal is None or ends[0].signal == signal.SIGKILL
    assert all(report.stopped for report in ends.values())
    assert not stopped.finished
    assert stopped.killed == (0,)


@pytest.mark.process
def test_a_rank_that_starts_after_the_stop_is_stopped_too(tmp_path: Path) -> None:
    async def set_stopping(attempt: Attempt) -> None:
        attempt.stopping = True

    # A rank that reports its start after the signal was sent finds `stopping` set.
    (exited,), (_, stopped) = run_attempt(tmp_path, SLEEPS, set_stopping)
    assert (exited.signal, exited.stopped) == (signal.SIGTERM, True)
    assert not stopped.finished


@pytest.mark.process
def test_a_stop_during_the_start_of_torchrun_is_not_lost(tmp_path: Path) -> None:
    async def run() -> HostStopped:
        place = a_place(tmp_path)
        attempt = Attempt(a_start(place, SLEEPS), place, SystemClock())
        launching = asyncio.create_task(attempt.launch(Standby(place, os.environ), os.environ))
        await asyncio.sleep(0)
        assert attempt.torchrun is None
        await attempt.stop(60.0)
        await launching
        _, stopped = await asyncio.wait_for(attempt.wait(), WAIT_S)
        return stopped

    stopped = asyncio.run(run())
    assert (stopped.finished, stopped.why) == (False, ""), "a requested stop is no failure"


@pytest.mark.process
def test_a_stop_does_not_wait_for_imports_longer_than_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cold node imports take a minute; a pod has less time than that until SIGKILL."""
    (tmp_path / "first.py").write_text("")
    (tmp_path / "library.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    place = replace(a_place(tmp_path), imports=("first", "library"))
    clock = TurnedClock()

    async def run() -> HostStopped:
        attempt, standby = Attempt(a_start(place, SLEEPS), place, clock), Standby(place, os.environ)
        launching = asyncio.create_task(attempt.launch(standby, os.environ))
        await until(lambda: standby.busy, "a fork server")
        (launcher,) = standby.busy
        stopping = asyncio.create_task(attempt.stop(5.0))
        await until(lambda: attempt.stopping, "the stop")
        assert not launching.done(), (
            "a fork server whose imports finish in time serves the next attempt"
        )
        clock.time += 5.0
        await asyncio.wait_for(asyncio.gather(launching, stopping), WAIT_S)
        _, stopped = await asyncio.wait_for(attempt.wait(), WAIT_S)
        assert is_gone(launcher.pid)
        return stopped

    assert asyncio.run(run()) == HostStopped(attempt=1, host="host-0", finished=False)
    assert is_free(place.lock)


@pytest.mark.process
def test_after_a_kill_of_torchrun_no_process_is_left_and_its_ranks_are_reported(
    tmp_path: Path,
) -> None:
    async def kill_parent(attempt: Attempt) -> None:
        await ranks_started(2)(attempt)
        assert attempt.torchrun is not None
        kill(attempt.torchrun.pid)

    reports, (unseen, stopped) = run_attempt(tmp_path, SLEEPS, kill_parent, ranks=2)
    assert reports == []
    assert [(one.rank, one.exit_code, one.signal, one.above) for one in unseen] == [
        (rank, None, 9, "torchrun") for rank in range(2)
    ]
    assert not any(exited.stopped for exited in unseen)
    assert stopped.why.startswith("torchrun ended with code -9")


@pytest.mark.process
def test_a_killed_fork_server_is_reported_with_its_signal(tmp_path: Path) -> None:
    async def kill_parent(attempt: Attempt) -> None:
        await ranks_started(2)(attempt)
        assert attempt.torchrun is not None
        kill(attempt.torchrun.launcher.pid)

    reports, (unseen, _) = run_attempt(tmp_path, SLEEPS, kill_parent, ranks=2)
    # A watcher that lives a moment longer than its rank reports the rank's end itself.
    assert sorted(one.rank for one in (*reports, *unseen)) == [0, 1]
    assert {(one.above, one.signal) for one in unseen} == {("launcher", 9)}


@pytest.mark.process
def test_a_rank_whose_watcher_is_killed_is_reported_while_torchrun_lives(tmp_path: Path) -> None:
    async def kill_watcher(attempt: Attempt) -> None:
        await ranks_started(2)(attempt)
        assert attempt.torchrun is not None
        # Torchrun notices its killed child only after seconds. Here it never does.
        os.kill(attempt.torchrun.pid, signal.SIGSTOP)
        watcher = parent_of(attempt.ranks[1].pid)
        assert watcher is not None
        kill(watcher)
        await until(lambda: attempt.ranks[1].ended is not None, "the report")
        assert attempt.ranks[0].ended is None
        await attempt.stop(0.0)

    reports, (unseen, _) = run_attempt(tmp_path, SLEEPS, kill_watcher, ranks=2)
    lost = next(one for one in reports if one.rank == 1)
    assert (lost.exit_code, lost.signal, lost.above, lost.stopped) == (None, None, None, False)
    assert 1 not in [one.rank for one in unseen]


def test_the_end_that_a_watcher_reported_itself_counts(attempt: Attempt) -> None:
    ended = RankExited(attempt=1, rank=1, exit_code=3, signal=None)
    assert attempt.hear(ended) is not None
    assert attempt.hear(replace(ended, exit_code=None)) is None
    assert [one.exit_code for one in attempt.failures()] == [3]


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_rank_that_ends_after_its_torchrun_was_killed_is_not_the_cause(
    attempt: Attempt, by_agent: bool
) -> None:
    class Killed:
        ended, launcher_signal = Ended(code=-9, out="", err=""), None

    attempt.torchrun = cast(Running, Killed())
    attempt.killed = attempt.stopping = by_agent
    told = attempt.hear(RankExited(attempt=1, rank=1, exit_code=None, signal=signal.SIGTERM))
    assert (told is not None) == by_agent
    raised = attempt.hear(RankExited(attempt=1, rank=0, exit_code=1, signal=None))
    assert raised is not None, "its own error"


def test_a_killed_rank_watcher_is_found_in_the_log_of_torchrun(tmp_path: Path) -> None:
    log = tmp_path / "torchrun.log"
    log.write_text(
        "E1123 09:21:07.001000 4711 torch/distributed/elastic/multiprocessing/api.py:743] failed"
        " (exitcode: -9) local_rank: 1 (pid: 4713) of fn: run_script_path (start_method: fork)\n"
    )
    assert keepers_killed(log) == {1: ("keeper", 9)}


@pytest.mark.process
def test_the_output_of_torchrun_is_the_reason_of_a_failed_launch(tmp_path: Path) -> None:
    reports, (unseen, stopped) = run_attempt(tmp_path, SLEEPS, do_nothing, FAKE_TORCHRUN_FAILS="1")
    assert (reports, unseen) == ([], [])
    assert not stopped.finished
    assert stopped.why == "torchrun ended with code 3\nthe rendezvous was refused"


CHILD = """
import os, pathlib, subprocess, sys
start = {}
child = subprocess.Popen([sys.executable, "-c", {!r}], stdout=subprocess.PIPE, **start)
child.stdout.readline()  # it is ready for SIGTERM
pathlib.Path({!r}).write_text(str(child.pid))
sys.exit({})
"""
READY = "import signal, time; {} print(flush=True); time.sleep(600)"
IGNORES = READY.format("signal.signal(signal.SIGTERM, signal.SIG_IGN);")


@pytest.mark.process
@pytest.mark.parametrize(
    "start",
    ["{}", "{'env': {}}", "{'start_new_session': True}"],
    ids=["plain", "without variables", "in its own session"],
)
@pytest.mark.parametrize("code", [0, 9])
def test_programs_that_a_rank_left_running_are_ended(
    tmp_path: Path, start: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "pid"
    program = CHILD.format(start, READY.format(""), str(file), code)
    _, (_, stopped) = run_attempt(tmp_path, program, do_nothing)
    assert stopped.finished == (code == 0)
    assert is_gone(int(file.read_text()))
    assert f"attempt 1: ending what is left: {file.read_text()} (python" in caplog.text


@pytest.mark.process
def test_programs_that_a_killed_rank_left_running_are_ended(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = CHILD.format("{}", READY.format(""), str(file), "__import__('time').sleep(600)")

    async def kill_rank(attempt: Attempt) -> None:
        await until(lambda: file.exists() and file.read_text() != "", "the child")
        kill(attempt.ranks[0].pid)

    run_attempt(tmp_path, program, kill_rank)
    assert is_gone(int(file.read_text()))


@pytest.mark.process
@pytest.mark.parametrize("start", ["{}", "{'start_new_session': True}"])
def test_what_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    monkeypatch.setattr("orchestrator.agent.attempt.REAP_S", 0.2)
    file = tmp_path / "pid"
    run_attempt(tmp_path, CHILD.format(start, IGNORES, str(file), 0), do_nothing)
    assert is_gone(int(file.read_text()))


SAVES_AT_THE_END = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    pathlib.Path({!r}).touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
print(flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_what_finished_ranks_leave_running_has_the_grace_of_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.agent.attempt.REAP_S", 0.0)
    saved = tmp_path / "saved"
    program = CHILD.format("{}", SAVES_AT_THE_END.format(str(saved)), str(tmp_path / "pid"), 0)
    run_attempt(tmp_path, program, do_nothing, stop_grace=WAIT_S)
    assert saved.exists()


@pytest.mark.process
def test_a_stop_ends_the_grace_of_what_finished_ranks_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host failed: the next attempt waits for this one."""
    monkeypatch.setattr("orchestrator.agent.attempt.REAP_S", 0.2)
    file = tmp_path / "pid"

    async def stop_late(attempt: Attempt) -> None:
        await until(lambda: attempt.kill_at > 0, "the end of the ranks")
        await attempt.stop(0.0)

    program = CHILD.format("{}", IGNORES, str(file), 0)
    _, (_, stopped) = run_attempt(tmp_path, program, stop_late, stop_grace=WAIT_S)
    assert stopped.finished
    assert is_gone(int(file.read_text()))


@pytest.mark.process
def test_forks_that_a_rank_left_running_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.agent.attempt.REAP_S", 0.2)
    program = "import os, signal, time\nif os.fork() == 0:\n"
    program += "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(600)\n"
    _, (_, stopped) = run_attempt(tmp_path, program, do_nothing)
    assert stopped.finished


@pytest.mark.process
def test_a_python_that_does_not_exist_raises_oserror(tmp_path: Path) -> None:
    async def run() -> None:
        place = a_place(tmp_path)
        start = a_start(place, SLEEPS)
        Path(place.python).unlink()
        standby = Standby(place, os.environ)
        await Attempt(start, place, SystemClock()).launch(standby, os.environ)

    with pytest.raises(OSError, match="python"):
        asyncio.run(run())


# Without processes: how an attempt handles the messages of ranks


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def attempt(tmp_path: Path, clock: TurnedClock) -> Attempt:
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "", ranks=2), place, clock)
    for rank in (1, 0):
        attempt.hear(RankStarted(attempt=1, rank=rank, local_rank=rank, pid=2_000_000_000 + rank))
    return attempt


def test_a_digest_has_the_silence_and_the_standstill_of_each_rank(
    attempt: Attempt, clock: TurnedClock
) -> None:
    beat = Beat(attempt=1, rank=1, step=3, phase="train", loss=2.5, tokens_per_second=9.0)
    attempt.hear(beat)
    clock.sleep(2.0)
    attempt.hear(Beat(attempt=1, rank=1, step=3, phase="train"))
    clock.sleep(1.0)
    zero, one = attempt.digest()
    assert (zero.rank, zero.step, zero.phase, zero.age_s, zero.ended) == (0, 0, "init", 3.0, False)
    assert (one.step, one.phase, one.age_s, one.still_s) == (3, "train", 1.0, 3.0)
    assert (one.loss, one.tokens_per_second) == (2.5, 9.0)


def test_an_exit_has_the_exception_that_was_reported_before_it(attempt: Attempt) -> None:
    raised = RankRaised(
        attempt=1,
        rank=0,
        error=RankError(error="ValueError", message="no", step=4, traceback="Traceback …"),
    )
    assert attempt.hear(raised) is None
    exited = attempt.hear(RankExited(attempt=1, rank=0, exit_code=1, signal=None))
    assert exited is not None
    assert exited.error is not None
    assert (exited.error.error, exited.error.step, exited.stopped) == ("ValueError", 4, False)


def test_the_agent_overwrites_fields_that_a_rank_cannot_know(attempt: Attempt) -> None:
    forged = RankExited(
        at=1.0,
        attempt=1,
        rank=0,
        host="host-9",
        exit_code=1,
        signal=None,
        stopped=True,
        detected_after_s=1e9,
        log_tail=("CUDA error",),
        phase="exit",
    )
    exited = attempt.hear(forged)
    assert exited is not None
    assert (exited.host, exited.stopped, exited.log_tail) == ("host-0", False, ())
    assert (exited.phase, exited.detected_after_s < 1.0) == ("init", True)


def test_an_exit_before_the_stop_stays_a_cause_when_it_is_reported_again(attempt: Attempt) -> None:
    before = attempt.hear(RankExited(attempt=1, rank=0, exit_code=1, signal=None))
    attempt.kill()
    after = attempt.hear(RankExited(attempt=1, rank=1, exit_code=1, signal=None))
    assert before is not None
    assert after is not None
    assert (before.stopped, after.stopped) == (False, True)
    assert not attempt.exited(before).stopped


def test_a_rank_that_exited_before_the_stop_was_not_stopped(attempt: Attempt) -> None:
    asyncio.run(attempt.stop(0.0))  # the exits are not reported yet, or never
    reported = attempt.hear(RankExited(attempt=1, rank=0, exit_code=None, signal=9))
    assert reported is not None
    assert not reported.stopped
    assert not attempt.exited(RankExited(attempt=1, rank=1, exit_code=None, signal=None)).stopped


def test_exits_of_unknown_ranks_and_exit_code_0_are_not_reported(attempt: Attempt) -> None:
    assert attempt.hear(RankExited(attempt=1, rank=7, exit_code=1, signal=None)) is None
    assert attempt.hear(RankExited(attempt=1, rank=1, exit_code=0, signal=None)) is None
    assert attempt.digest()[1].ended


def returned_of(attempt: Attempt) -> list[int]:
    """Ranks that are reported, at the end of the attempt, as having returned first."""
    unreported, _ = asyncio.run(attempt.wait())
    return [exited.rank for exited in unreported if exited.ended_first]


@pytest.mark.parametrize(("steps", "reported"), [(0, [1]), (10, [])])
def test_a_return_before_another_rank_failed_is_reported_if_the_steps_are_unknown(
    tmp_path: Path, clock: TurnedClock, steps: int, reported: list[int]
) -> None:
    place = a_place(tmp_path)
    attempt = Attempt(replace(a_start(place, "", ranks=2), steps=steps), place, clock)
    for rank in (0, 1):
        attempt.hear(RankStarted(attempt=1, rank=rank, local_rank=rank, pid=2_000_000_000 + rank))
    attempt.hear(RankExited(attempt=1, rank=1, exit_code=0, signal=None, step=20))
    attempt.hear(RankExited(attempt=1, rank=0, exit_code=1, signal=None, step=20))
    assert returned_of(attempt) == reported


def test_ranks_that_returned_when_all_did_or_when_they_were_stopped_are_not_reported(
    tmp_path: Path, clock: TurnedClock
) -> None:
    place = a_place(tmp_path)
    for code in (0, 1):
        attempt = Attempt(replace(a_start(place, "", ranks=2), steps=0), place, clock)
        for rank in (0, 1):
            attempt.hear(RankStarted(attempt=1, rank=rank, local_rank=rank, pid=os.getpid()))
        attempt.stopping = code == 1
        attempt.hear(RankExited(attempt=1, rank=0, exit_code=0, signal=None, step=20))
        attempt.hear(RankExited(attempt=1, rank=1, exit_code=code, signal=None, step=20))
        assert returned_of(attempt) == []


@pytest.mark.process
def test_evidence_of_a_rank_has_its_kernel_function_and_its_time_without_a_processor(
    tmp_path: Path, clock: TurnedClock
) -> None:
    place = a_place(tmp_path)
    waits_in_kernel = "import ctypes, time; ctypes.CDLL(None).vfork(); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", waits_in_kernel], start_new_session=True)
    throttled = iter((3, 8))
    start = a_start(place, "", ranks=1)
    attempt = Attempt(start, place, clock, throttles=lambda: next(throttled))
    try:
        wait_for(lambda: process_state(child.pid) == "D", "D")
        attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=child.pid))
        attempt.ranks[0].pace.still(clock.monotonic() + 9.0, 1e9)
        clock.sleep(9.0)
        (reported,) = asyncio.run(attempt.gather(0.1, {}, hang=True))
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert reported.process_state == "D"
    assert "clone" in reported.place or "vfork" in reported.place
    assert (reported.still_s, reported.starved_s, reported.throttled) == (9.0, 9.0, True)


MUTE_RANK = """
import os, signal, sys, time
from orchestrator.contract.files.env import STACKS_IN_C, STACKS_SIGNAL
signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
end = lambda *_: os.kill(os.getpid(), signal.SIGSEGV)
signal.signal(STACKS_IN_C, end if sys.argv[1] == "crashes" else signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_a_rank_that_crashes_when_it_is_urged_is_not_the_cause(
    tmp_path: Path, clock: TurnedClock
) -> None:
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "", ranks=2), place, clock)
    children = [
        subprocess.Popen([sys.executable, "-c", MUTE_RANK, how], stdout=subprocess.PIPE)
        for how in ("crashes", "survives")
    ]
    try:
        for rank, child in enumerate(children):
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            attempt.hear(RankStarted(attempt=1, rank=rank, local_rank=rank, pid=child.pid))
        asyncio.run(attempt.gather(0.3, {}, hang=False))
        assert [child.poll() for child in children] == [None, None], "they will go on"
        asyncio.run(attempt.gather(0.5, {}, hang=True))
        assert children[0].wait(WAIT_S) == -signal.SIGSEGV
        assert children[1].poll() is None
    finally:
        for child in children:
            child.kill()
            child.communicate(timeout=WAIT_S)
    ends = [
        attempt.hear(RankExited(attempt=1, rank=rank, exit_code=None, signal=signal.SIGSEGV))
        for rank in range(2)
    ]
    assert [end is not None and end.stopped for end in ends] == [True, False]


def test_ranks_that_have_ended_are_not_asked_for_evidence(attempt: Attempt) -> None:
    attempt.hear(RankExited(attempt=1, rank=1, exit_code=0, signal=None))
    (zero,) = asyncio.run(attempt.gather(0.1, {}, hang=True))
    assert (zero.rank, zero.process_state, zero.stack) == (0, "gone", ())

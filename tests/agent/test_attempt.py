"""Attempts with real keepers, under a torchrun and a trainer that import nothing."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.agent.attempt import Attempt, keepers_killed
from orchestrator.agent.evidence.rank_evidence import process_state
from orchestrator.agent.processes.fork_server_client import Standby
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


def play(
    folder: Path,
    program: str,
    script: Script,
    ranks: int = 1,
    clock: Clock | None = None,
    steps: int = 0,
    **environ: str,
) -> tuple[list[RankExited], Outcome]:
    """Run an attempt and `script` beside it; what was reported meanwhile, and how it ended."""

    async def run() -> tuple[list[RankExited], Outcome]:
        place = a_place(folder)
        start = replace(a_start(place, program, ranks), steps=steps)
        attempt = Attempt(start, place, clock or SystemClock())
        standby = Standby(place, os.environ)
        reports: list[RankExited] = []
        ears = await listen(place.socket, lambda d: reports.extend(filter(None, [attempt.hear(d)])))
        try:
            await attempt.launch(standby, {**os.environ, **environ})
            waiting = asyncio.create_task(attempt.wait())
            await script(attempt)
            outcome = await asyncio.wait_for(waiting, WAIT_S)
        finally:
            attempt.kill()
            ears.close()
        assert is_free(place.lock)
        assert all(is_gone(record.pid) for record in attempt.ranks.values())
        return reports, outcome

    return asyncio.run(run())


async def nothing(attempt: Attempt) -> None:
    pass


def started(count: int) -> Script:
    async def script(attempt: Attempt) -> None:
        await until(lambda: len(attempt.ranks) == count, f"{count} ranks")

    return script


HAS_DONE = (
    "import os, struct; os.write(int(os.environ['NDCTL_PROGRESS_FD']), struct.pack('<q', {}))"
)


@pytest.mark.process
def test_a_rank_that_returns_0_before_the_last_step_has_not_done_its_work(tmp_path: Path) -> None:
    program = HAS_DONE.format(7)
    reports, (unseen, stopped) = play(tmp_path, program, nothing, steps=10)
    (exited,) = reports
    assert (exited.exit_code, exited.step, exited.stopped) == (0, 7, False)
    assert (unseen, stopped.finished) == ([], False)


@pytest.mark.process
def test_the_last_step_counts_though_no_heartbeat_came(tmp_path: Path) -> None:
    program = HAS_DONE.format(10)
    reports, (unseen, stopped) = play(tmp_path, program, nothing, ranks=2, steps=10)
    assert (reports, unseen, stopped.finished) == ([], [], True)


@pytest.mark.process
def test_an_attempt_whose_ranks_all_return_0_is_finished(tmp_path: Path) -> None:
    reports, (unseen, stopped) = play(tmp_path, "print('trained')", nothing, ranks=2)
    assert (reports, unseen) == ([], [])
    assert stopped == HostStopped(attempt=1, host="host-0", finished=True)
    logs = tmp_path / "job" / "logs" / "attempt-1" / "host-0"
    assert (logs / "rank-1.log").read_text() == "trained\n"


@pytest.mark.process
def test_the_end_of_an_attempt_is_seen_on_nfs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setenv("PYTHONPATH", str(LOCKS_AS_ON_NFS), prepend=os.pathsep)

    async def while_it_runs(attempt: Attempt) -> None:
        await until(lambda: len(attempt.ranks) == 1, "the rank")
        assert not is_free(attempt.place.lock)
        kill(attempt.ranks[0].pid)

    _, (unseen, stopped) = play(tmp_path, SLEEPS, while_it_runs)
    assert (unseen, stopped.finished) == ([], False)
    _, (unseen, stopped) = play(tmp_path, "print('trained')", nothing, ranks=2)
    assert (unseen, stopped.finished) == ([], True)


@pytest.mark.process
def test_a_rank_that_fails_is_reported_and_its_peers_are_ended(tmp_path: Path) -> None:
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
    reports, (unseen, stopped) = play(tmp_path, program, nothing, ranks=2)
    first, second = reports
    assert (first.rank, first.exit_code, first.stopped) == (1, 9, False)
    assert (second.rank, second.signal) == (0, signal.SIGTERM), "torchrun ends it"
    assert unseen == []
    assert not stopped.finished
    assert stopped.why.startswith("torchrun ended with code 1")


@pytest.mark.process
def test_stop_asks_ranks_to_leave_and_kills_the_one_that_ignores_it(tmp_path: Path) -> None:
    clock = TurnedClock()

    async def stop(attempt: Attempt) -> None:
        await started(2)(attempt)
        log = attempt.log_dir / "rank-0.log"
        await until(lambda: log.exists() and log.read_text() == "ready\n", "the stubborn rank")
        stopping = asyncio.create_task(attempt.stop(5.0))
        await until(lambda: attempt.ranks[1].ended, "the end of the other")
        assert not attempt.ranks[0].ended
        clock.sleep(5.0)
        await stopping

    program = f"import os\nif os.environ['RANK'] == '1':\n    {SLEEPS}\n{IGNORES_TERM}"
    reports, (unseen, stopped) = play(tmp_path, program, stop, ranks=2, clock=clock)
    ends = {report.rank: report for report in (*reports, *unseen)}
    assert ends[1].signal == signal.SIGTERM
    # Nobody may see the stubborn one die.
    assert ends[0].signal is None or ends[0].signal == signal.SIGKILL
    assert all(report.stopped for report in ends.values())
    assert not stopped.finished


@pytest.mark.process
def test_a_rank_that_starts_after_the_stop_is_asked_to_leave_as_well(tmp_path: Path) -> None:
    async def begin(attempt: Attempt) -> None:
        attempt.stopping = True

    # `stopping` without the signal is what a rank meets whose word came after the signal went out.
    (exited,), (_, stopped) = play(tmp_path, SLEEPS, begin)
    assert (exited.signal, exited.stopped) == (signal.SIGTERM, True)
    assert not stopped.finished


@pytest.mark.process
def test_a_stop_while_torchrun_is_being_started_is_not_lost(tmp_path: Path) -> None:
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
    assert (stopped.finished, stopped.why) == (False, ""), "it was told to stop"


@pytest.mark.process
def test_a_stop_does_not_wait_for_imports_longer_than_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cold node they take a minute, and a pod has less than that until SIGKILL."""
    (tmp_path / "first.py").write_text("")
    (tmp_path / "library.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    place = replace(a_place(tmp_path), imports=("first", "library"))
    clock = TurnedClock()

    async def run() -> HostStopped:
        attempt, standby = Attempt(a_start(place, SLEEPS), place, clock), Standby(place, os.environ)
        launching = asyncio.create_task(attempt.launch(standby, os.environ))
        await until(lambda: standby.busy, "a launcher")
        (launcher,) = standby.busy
        stopping = asyncio.create_task(attempt.stop(5.0))
        await until(lambda: attempt.stopping, "the stop")
        assert not launching.done(), "what is imported in time is there for the next attempt"
        clock.time += 5.0
        await asyncio.wait_for(asyncio.gather(launching, stopping), WAIT_S)
        _, stopped = await asyncio.wait_for(attempt.wait(), WAIT_S)
        assert is_gone(launcher.pid)
        return stopped

    assert asyncio.run(run()) == HostStopped(attempt=1, host="host-0", finished=False)
    assert is_free(place.lock)


@pytest.mark.process
def test_a_torchrun_that_is_killed_leaves_nothing_and_its_ranks_are_told_as_unseen(
    tmp_path: Path,
) -> None:
    async def murder(attempt: Attempt) -> None:
        await started(2)(attempt)
        assert attempt.torchrun is not None
        kill(attempt.torchrun.pid)

    reports, (unseen, stopped) = play(tmp_path, SLEEPS, murder, ranks=2)
    assert reports == []
    assert [(one.rank, one.exit_code, one.signal, one.above) for one in unseen] == [
        (rank, None, 9, "torchrun") for rank in range(2)
    ]
    assert not any(exited.stopped for exited in unseen)
    assert stopped.why.startswith("torchrun ended with code -9")


@pytest.mark.process
def test_a_launcher_that_is_killed_is_told_with_its_signal(tmp_path: Path) -> None:
    async def murder(attempt: Attempt) -> None:
        await started(2)(attempt)
        assert attempt.torchrun is not None
        kill(attempt.torchrun.launcher.pid)

    _, (unseen, _) = play(tmp_path, SLEEPS, murder, ranks=2)
    assert [(one.above, one.signal) for one in unseen] == [("launcher", 9)] * 2


def test_the_keeper_that_torchrun_saw_killed_is_known_by_its_signal(tmp_path: Path) -> None:
    log = tmp_path / "torchrun.log"
    log.write_text(
        "E1123 09:21:07.001000 4711 torch/distributed/elastic/multiprocessing/api.py:743] failed"
        " (exitcode: -9) local_rank: 1 (pid: 4713) of fn: run_script_path (start_method: fork)\n"
    )
    assert keepers_killed(log) == {1: ("keeper", 9)}


@pytest.mark.process
def test_what_torchrun_said_is_why_it_failed_at_once(tmp_path: Path) -> None:
    reports, (unseen, stopped) = play(tmp_path, SLEEPS, nothing, FAKE_TORCHRUN_FAILS="1")
    assert (reports, unseen) == ([], [])
    assert not stopped.finished
    assert stopped.why == "torchrun ended with code 3\nthe rendezvous was refused"


@pytest.mark.process
def test_what_a_rank_left_running_is_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.agent.attempt.REAP_S", 0.2)
    program = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\n"
    _, (_, stopped) = play(tmp_path, program, nothing)
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


# Without processes: what it makes of the ranks' words


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


def test_a_digest_tells_how_long_a_rank_was_silent_and_how_long_still(
    attempt: Attempt, clock: TurnedClock
) -> None:
    beat = Beat(attempt=1, rank=1, step=3, phase="train", loss=2.5, tokens_per_second=9.0)
    attempt.hear(beat)
    clock.sleep(2.0)
    attempt.hear(Beat(attempt=1, rank=1, step=3, phase="train", memory_bytes=7))
    clock.sleep(1.0)
    zero, one = attempt.digest()
    assert (zero.rank, zero.step, zero.phase, zero.age_s, zero.ended) == (0, 0, "init", 3.0, False)
    assert (one.step, one.phase, one.age_s, one.still_s) == (3, "train", 1.0, 3.0)
    assert (one.loss, one.tokens_per_second, one.memory_bytes) == (2.5, 9.0, 7)


def test_an_exception_goes_with_the_exit_that_follows_it(attempt: Attempt) -> None:
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


def test_what_a_rank_cannot_know_of_its_end_is_overwritten_by_its_agent(attempt: Attempt) -> None:
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


def test_an_exit_before_the_stop_stays_a_cause_when_it_is_said_again(attempt: Attempt) -> None:
    before = attempt.hear(RankExited(attempt=1, rank=0, exit_code=1, signal=None))
    attempt.kill()
    after = attempt.hear(RankExited(attempt=1, rank=1, exit_code=1, signal=None))
    assert before is not None
    assert after is not None
    assert (before.stopped, after.stopped) == (False, True)
    assert not attempt.exited(before).stopped


def test_a_rank_that_was_gone_before_the_stop_is_no_consequence_of_it(attempt: Attempt) -> None:
    asyncio.run(attempt.stop(0.0))  # the news of their ends is still on the way, or never comes
    told = attempt.hear(RankExited(attempt=1, rank=0, exit_code=None, signal=9))
    assert told is not None
    assert not told.stopped
    assert not attempt.exited(RankExited(attempt=1, rank=1, exit_code=None, signal=None)).stopped


def test_words_of_a_rank_that_never_started_and_returns_of_0_are_no_exits(attempt: Attempt) -> None:
    assert attempt.hear(RankExited(attempt=1, rank=7, exit_code=1, signal=None)) is None
    assert attempt.hear(RankExited(attempt=1, rank=1, exit_code=0, signal=None)) is None
    assert attempt.digest()[1].ended


@pytest.mark.process
def test_evidence_of_a_rank_says_where_in_the_kernel_it_waits_and_what_it_had_no_processor_for(
    tmp_path: Path, clock: TurnedClock
) -> None:
    place = a_place(tmp_path)
    waits = "import ctypes, time; ctypes.CDLL(None).vfork(); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", waits], start_new_session=True)
    throttled = iter((3, 8))
    start = a_start(place, "", ranks=1)
    attempt = Attempt(start, place, clock, throttles=lambda: next(throttled))
    try:
        wait_for(lambda: process_state(child.pid) == "D", "D")
        attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=child.pid))
        attempt.ranks[0].pace.still(clock.monotonic() + 9.0, 1e9)
        clock.sleep(9.0)
        (told,) = asyncio.run(attempt.gather(0.1, {}))
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert told.process_state == "D"
    assert "clone" in told.place or "vfork" in told.place
    assert (told.still_s, told.starved_s, told.throttled) == (9.0, 9.0, True)


def test_ranks_that_have_ended_are_not_asked_for_evidence(attempt: Attempt) -> None:
    attempt.hear(RankExited(attempt=1, rank=1, exit_code=0, signal=None))
    (zero,) = asyncio.run(attempt.gather(0.1, {}))
    assert (zero.rank, zero.process_state, zero.stack) == (0, "gone", ())

"""What a host says of itself and its ranks, also where its storage does not answer."""

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.agent.attempt import Attempt
from orchestrator.agent.evidence import evidence_collector, flight_recorder, rank_evidence
from orchestrator.agent.evidence.evidence_collector import gather, keep, look_back, with_last_lines
from orchestrator.agent.processes.cgroups import Count
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.messages.rank_messages import Beat, RankStarted
from orchestrator.health.host_probes import KERNEL_LINES, HostProbe, no_probe
from orchestrator.system import SystemClock
from tests.agent.world import WAIT_S, LoopClock, TurnedClock, a_place, a_start, run_with_clock

GONE = 2_000_000_000


def ended(tmp_path: Path) -> tuple[Attempt, RankExited, Path]:
    """A rank of an attempt that has failed, and where its log is."""
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "pass"), place, SystemClock())
    attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=GONE))
    exited = attempt.hear(RankExited(attempt=1, rank=0, exit_code=3, signal=None))
    assert exited is not None
    attempt.log_dir.mkdir(parents=True)
    return attempt, exited, attempt.log_dir / "rank-0.log"


def test_the_end_of_its_log_is_told_with_the_end_of_a_rank(tmp_path: Path) -> None:
    attempt, exited, log = ended(tmp_path)
    log.write_text("step 1\nbad data\n")
    assert asyncio.run(with_last_lines(attempt, exited)).log_tail == ("step 1", "bad data")


def test_a_log_that_does_not_answer_holds_nobody_up_and_is_named(
    tmp_path: Path,
) -> None:
    """To open a pipe that nobody writes to takes for ever."""
    attempt, exited, log = ended(tmp_path)
    os.mkfifo(log)

    async def look(clock: LoopClock) -> RankExited:
        attempt.clock = clock
        telling = asyncio.create_task(with_last_lines(attempt, exited, WAIT_S))
        await asyncio.sleep(0)
        clock.put_forward(WAIT_S)  # the agent does other things meanwhile
        told = await telling
        os.close(os.open(log, os.O_WRONLY))  # the thread that reads may go
        return told

    told = run_with_clock(look)
    assert "timed out after" in told.log_tail[0]
    assert str(log) in told.log_tail[0]
    assert told.detected_after_s >= exited.detected_after_s + WAIT_S, (
        "that it ended is not told as later than it was"
    )


def fallen(pids: Mapping[int, int], limit_s: float) -> HostProbe:
    """A GPU has fallen off the bus, and the driver says more of each channel."""
    xid = "NVRM: Xid (PCI:0000:1b:00):"
    now = SystemClock().monotonic() + 1
    first = f"[{now:.6f}] {xid} 79, GPU has fallen off the bus."
    return HostProbe(
        kernel=(first, *(f"[{now:.6f}] {xid} 45, pid={n}, Ch {n:08x}" for n in range(64)))
    )


def running(tmp_path: Path) -> Attempt:
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "pass"), place, SystemClock())
    attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=GONE))
    return attempt


def test_what_the_kernel_said_first_is_told_however_much_it_said_after(tmp_path: Path) -> None:
    attempt = running(tmp_path)
    traces = attempt.place.run_dir.traces(1)
    traces.mkdir(parents=True)

    async def look() -> tuple[str, ...]:
        found = await gather(attempt, 0.1, fallen)
        await keep(attempt, found)
        return found.evidence.event.kernel

    kernel = asyncio.run(look())
    assert "79, GPU has fallen off the bus" in kernel[0]
    (kept,) = map(json.loads, (traces / "host-host-0.jsonl").read_text().splitlines())
    assert len(kept["probes"]["kernel"]) == KERNEL_LINES


def test_a_rank_that_was_ended_for_its_memory_is_told_where_nobody_may_read_the_kernels_log(
    tmp_path: Path,
) -> None:
    place, counts = a_place(tmp_path), iter((4, 5))
    attempt = Attempt(a_start(place, "pass"), place, SystemClock(), lambda: next(counts))
    found = asyncio.run(look_back(attempt, WAIT_S, no_probe))
    assert found.evidence.event.kernel == (
        "memory cgroup: oom_kill 4 -> 5: the kernel killed 1 process of this group",
    )


DAY_S = 86_400.0
REMAPPED = "NVRM: Xid (PCI:0000:3b:00): 63, pid=1, Row Remapper: New row marked for remapping"


def days_long(tmp_path: Path, kills: Count = lambda: None) -> tuple[Attempt, TurnedClock]:
    """An attempt whose rank has trained for nine days, and did its last step just now."""
    clock = TurnedClock(5_000.0)
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "pass"), place, clock, kills)
    attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=GONE))
    for step in range(1, 10):
        clock.sleep(DAY_S)
        attempt.hear(Beat(attempt=1, rank=0, step=step, phase="train"))
        attempt.digest()
    return attempt, clock


def kernel_of(attempt: Attempt, lines: tuple[str, ...] = ()) -> tuple[str, ...]:
    found = asyncio.run(look_back(attempt, WAIT_S, lambda pids, limit_s: HostProbe(kernel=lines)))
    return found.evidence.event.kernel


def test_what_the_kernel_said_days_before_an_incident_is_not_told_of_it(tmp_path: Path) -> None:
    attempt, clock = days_long(tmp_path)
    old = f"[{clock.monotonic() - 8 * DAY_S:.6f}] {REMAPPED}"
    near = f"[{clock.monotonic() - 60:.6f}] {REMAPPED}"
    assert kernel_of(attempt, (old,)) == ()
    assert kernel_of(attempt, (old, near)) == (near,)


def test_what_the_kernel_said_as_ranks_came_to_stand_still_is_told_however_long_ago(
    tmp_path: Path,
) -> None:
    """NCCL's watchdog ends them 10 to 60 minutes later; that this host slept meanwhile, or had no
    processor for them, changes nothing."""
    attempt, clock = days_long(tmp_path)
    then = f"[{clock.monotonic() + 1:.6f}] {REMAPPED}"
    clock.sleep(3_600.0)
    attempt.excuse(3_500.0)
    assert kernel_of(attempt, (then,)) == (then,)


def test_a_process_that_was_ended_for_memory_days_before_is_not_why_a_rank_is_now(
    tmp_path: Path,
) -> None:
    """As a worker of a data loader, for which the loader made another one."""
    many = [4]
    attempt, clock = days_long(tmp_path, lambda: many[0])
    many[0] = 5
    clock.sleep(60.0)
    attempt.digest()
    assert kernel_of(attempt) == (
        "memory cgroup: oom_kill 4 -> 5: the kernel killed 1 process of this group",
    )
    clock.sleep(DAY_S)
    attempt.hear(Beat(attempt=1, rank=0, step=10, phase="train"))
    assert kernel_of(attempt) == ()
    many[0] = 7
    assert kernel_of(attempt) == (
        "memory cgroup: oom_kill 5 -> 7: the kernel killed 2 processes of this group",
    )


def test_a_host_whose_storage_hangs_tells_what_it_knows_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()

    def hangs(*_: object) -> None:
        goes_on.wait(WAIT_S)

    for module, name in (
        (rank_evidence, "_sizes"),
        (flight_recorder, "_stamp"),
        (evidence_collector, "_write"),
    ):
        monkeypatch.setattr(module, name, hangs)
    attempt = running(tmp_path)

    async def look() -> tuple[str, ...]:
        found = await gather(attempt, 0.1, fallen)
        await keep(attempt, found, 0.1)
        told = found.evidence.event
        assert [(one.rank, one.process_state) for one in told.ranks] == [(0, "gone")]
        assert (told.withheld, told.unread) == ((), (0,)), "the journal and the verdict have it"
        assert all("timed out" in why for why in told.missing.values())
        assert set(told.missing) == {"dump of rank 0", "stack of rank 0"}
        return told.kernel

    assert "79, GPU has fallen off the bus" in asyncio.run(look())[0]
    assert "storage timed out" in caplog.messages[-1]
    assert not goes_on.is_set(), "nobody waited for it"
    goes_on.set()

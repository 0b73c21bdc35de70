"""Evidence of a host and its ranks, also if its storage hangs."""

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


def failed_rank(tmp_path: Path) -> tuple[Attempt, RankExited, Path]:
    """An attempt, the exit of its rank that failed, and the path of the rank's log."""
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "pass"), place, SystemClock())
    attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=GONE))
    exited = attempt.hear(RankExited(attempt=1, rank=0, exit_code=3, signal=None))
    assert exited is not None
    attempt.log_dir.mkdir(parents=True)
    return attempt, exited, attempt.log_dir / "rank-0.log"


def test_the_exit_of_a_rank_has_the_last_lines_of_its_log(tmp_path: Path) -> None:
    attempt, exited, log = failed_rank(tmp_path)
    log.write_text("step 1\nbad data\n")
    assert asyncio.run(with_last_lines(attempt, exited)).log_tail == ("step 1", "bad data")


def test_a_log_that_cannot_be_read_in_time_is_named_and_blocks_nothing(
    tmp_path: Path,
) -> None:
    """The log is a pipe without a writer, which blocks on open."""
    attempt, exited, log = failed_rank(tmp_path)
    os.mkfifo(log)

    async def collect(clock: LoopClock) -> RankExited:
        attempt.clock = clock
        telling = asyncio.create_task(with_last_lines(attempt, exited, WAIT_S))
        await asyncio.sleep(0)
        clock.put_forward(WAIT_S)  # the agent's loop is free meanwhile
        reported = await telling
        os.close(os.open(log, os.O_WRONLY))  # lets the reading thread end
        return reported

    reported = run_with_clock(collect)
    assert "timed out after" in reported.log_tail[0]
    assert str(log) in reported.log_tail[0]
    assert reported.detected_after_s >= exited.detected_after_s + WAIT_S, (
        "the time of the exit does not move by the wait"
    )


def gpu_lost(pids: Mapping[int, int], limit_s: float) -> HostProbe:
    """The kernel log of a lost GPU: one Xid 79, then one Xid 45 for each channel."""
    xid = "NVRM: Xid (PCI:0000:1b:00):"
    now = SystemClock().monotonic() + 1
    first = f"[{now:.6f}] {xid} 79, GPU has fallen off the bus."
    return HostProbe(
        kernel=(first, *(f"[{now:.6f}] {xid} 45, pid={n}, Ch {n:08x}" for n in range(64)))
    )


def running_attempt(tmp_path: Path) -> Attempt:
    place = a_place(tmp_path)
    attempt = Attempt(a_start(place, "pass"), place, SystemClock())
    attempt.hear(RankStarted(attempt=1, rank=0, local_rank=0, pid=GONE))
    return attempt


def test_the_first_kernel_line_is_kept_if_many_follow(tmp_path: Path) -> None:
    attempt = running_attempt(tmp_path)
    traces = attempt.place.run_dir.traces(1)
    traces.mkdir(parents=True)

    async def collect() -> tuple[str, ...]:
        found = await gather(attempt, 0.1, gpu_lost, hang=True)
        await keep(attempt, found)
        return found.evidence.event.kernel

    kernel = asyncio.run(collect())
    assert "79, GPU has fallen off the bus" in kernel[0]
    (saved,) = map(json.loads, (traces / "host-host-0.jsonl").read_text().splitlines())
    assert len(saved["probes"]["kernel"]) == KERNEL_LINES


def test_an_oom_kill_is_reported_even_if_the_kernel_log_is_unreadable(
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


def trained_for_days(tmp_path: Path, kills: Count = lambda: None) -> tuple[Attempt, TurnedClock]:
    """An attempt whose rank has trained for nine days and has just done a step."""
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


def test_kernel_lines_from_days_before_an_incident_are_not_reported(tmp_path: Path) -> None:
    attempt, clock = trained_for_days(tmp_path)
    old = f"[{clock.monotonic() - 8 * DAY_S:.6f}] {REMAPPED}"
    recent = f"[{clock.monotonic() - 60:.6f}] {REMAPPED}"
    assert kernel_of(attempt, (old,)) == ()
    assert kernel_of(attempt, (old, recent)) == (recent,)


def test_kernel_lines_from_the_start_of_a_standstill_are_reported(
    tmp_path: Path,
) -> None:
    """NCCL's watchdog aborts ranks 10 to 60 minutes later. A pause of the host, or a lack of
    processors in between, does not matter."""
    attempt, clock = trained_for_days(tmp_path)
    then = f"[{clock.monotonic() + 1:.6f}] {REMAPPED}"
    clock.sleep(3_600.0)
    attempt.excuse(3_500.0)
    assert kernel_of(attempt, (then,)) == (then,)


def test_an_oom_kill_from_days_before_is_not_reported(
    tmp_path: Path,
) -> None:
    """For example, the kernel killed a worker of the data loader, and the loader replaced it."""
    kills = [4]
    attempt, clock = trained_for_days(tmp_path, lambda: kills[0])
    kills[0] = 5
    clock.sleep(60.0)
    attempt.digest()
    assert kernel_of(attempt) == (
        "memory cgroup: oom_kill 4 -> 5: the kernel killed 1 process of this group",
    )
    clock.sleep(DAY_S)
    attempt.hear(Beat(attempt=1, rank=0, step=10, phase="train"))
    assert kernel_of(attempt) == ()
    kills[0] = 7
    assert kernel_of(attempt) == (
        "memory cgroup: oom_kill 5 -> 7: the kernel killed 2 processes of this group",
    )


def test_an_oom_kill_in_another_control_group_is_not_reported(tmp_path: Path) -> None:
    """For example, another job of the node, or another pod, has reached its limit."""
    counts: list[int | None] = [4]
    attempt, clock = trained_for_days(tmp_path, lambda: counts[-1])
    stamp = f"[{clock.monotonic() - 1:.6f}] "
    # Captured on Linux 6.18, from a group with a limit of its own.
    killed = (
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        " oom_kill_process.cold+0x8/0x8a",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
        "oom_memcg=/other,task_memcg=/other,task=python,pid=3470,uid=0",
        "Memory cgroup out of memory: Killed process 3470 (python) total-vm:111660kB,"
        " anon-rss:101760kB, file-rss:6072kB, shmem-rss:0kB, UID:0 pgtables:252kB oom_score_adj:0",
    )
    lines = tuple(stamp + line for line in killed)
    remapped = stamp + REMAPPED
    assert kernel_of(attempt, (*lines, remapped)) == (remapped,)
    # The group's counter cannot be read, or has grown.
    counts.append(None)
    clock.sleep(60.0)
    assert kernel_of(attempt, lines) == lines
    counts.append(5)
    clock.sleep(60.0)
    assert kernel_of(attempt, lines)[:4] == lines


def test_a_host_whose_storage_hangs_reports_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    def hangs(*_: object) -> None:
        released.wait(WAIT_S)

    for module, name in (
        (rank_evidence, "_sizes"),
        (flight_recorder, "_stamp"),
        (evidence_collector, "_write"),
    ):
        monkeypatch.setattr(module, name, hangs)
    attempt = running_attempt(tmp_path)

    async def collect() -> tuple[str, ...]:
        found = await gather(attempt, 0.1, gpu_lost, hang=True)
        await keep(attempt, found, 0.1)
        reported = found.evidence.event
        assert [(one.rank, one.process_state) for one in reported.ranks] == [(0, "gone")]
        assert (reported.withheld, reported.unread) == ((), (0,)), (
            "it is in the journal and in the verdict"
        )
        assert all("timed out" in why for why in reported.missing.values())
        assert set(reported.missing) == {"dump of rank 0", "stack of rank 0"}
        return reported.kernel

    assert "79, GPU has fallen off the bus" in asyncio.run(collect())[0]
    assert "storage timed out" in caplog.messages[-1]
    assert not released.is_set(), "no task waited for the storage"
    released.set()

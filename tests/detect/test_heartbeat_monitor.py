"""Detection of hangs, health and progress from digests and a clock."""

from typing import Any

import pytest
from msgspec.structs import replace

from ndctl.rank.phases import Phase
from orchestrator.contract.messages.agent_protocol import RankDigest, StepTimes
from orchestrator.contract.messages.events import (
    CheckpointSlow,
    HangDetected,
    HangOver,
    Health,
    HealthChanged,
    Span,
    StepReached,
)
from orchestrator.detect.heartbeat_monitor import HeartbeatMonitor, Limits

ADAPTIVE = Limits(hang=None, init=600.0)


def digest(rank: int, step: int, **more: Any) -> RankDigest:
    values: dict[str, Any] = {
        "rank": rank,
        "pid": 100 + rank,
        "step": step,
        "phase": "train",
        "age_s": 0.0,
        "still_s": 0.0,
        "loss": 2.5,
        "tokens_per_second": 900.0,
    }
    return RankDigest(**values | more)


def digests(step: int, ranks: int = 4, **more: Any) -> list[RankDigest]:
    return [digest(rank, step, **more) for rank in range(ranks)]


def new_monitor(limits: Limits = ADAPTIVE, ranks: int = 4) -> HeartbeatMonitor:
    return HeartbeatMonitor(1, range(ranks), limits, now=0.0)


def reached(step: int, loss: float | None) -> StepReached:
    return StepReached(attempt=1, step=step, loss=loss, tokens_per_second=900.0)


def changed(health: Health, age_s: float, *ranks: Span) -> HealthChanged:
    return HealthChanged(attempt=1, ranks=ranks, health=health, age_s=age_s)


def steps(count: int, total_s: float, longest_s: float | None = None) -> StepTimes:
    longest_s = total_s / count if longest_s is None else longest_s
    return StepTimes(count=count, total_s=total_s, longest_s=longest_s)


def monitor_after_steps(
    step_s: float, number: int = 10, limits: Limits = ADAPTIVE
) -> HeartbeatMonitor:
    """Steps of `step_s` seconds; the last is done at `number * step_s`."""
    monitor = new_monitor(limits)
    monitor.observe(digests(0), 0.0)
    for done in range(1, number + 1):
        monitor.observe(digests(done, steps=steps(1, step_s)), done * step_s)
    return monitor


def no_progress(monitor: HeartbeatMonitor, now: float, since: float, *ranks: int) -> None:
    """A digest in which nothing has moved since `since`."""
    monitor.observe([digest(rank, monitor.step, still_s=now - since) for rank in ranks], now)


# Limits


@pytest.mark.parametrize(("step_s", "limit"), [(0.01, 0.55), (1.0, 5.5), (1.5, 8.0), (60, 300.5)])
def test_the_hang_limit_is_five_steps_and_half_a_second(step_s: float, limit: float) -> None:
    assert monitor_after_steps(step_s).limit("train") == pytest.approx(limit)


@pytest.mark.parametrize(("step_s", "limit"), [(0.01, 10.0), (1.0, 10.0), (1.5, 15.0)])
def test_with_few_steps_known_the_limit_is_wider(step_s: float, limit: float) -> None:
    assert monitor_after_steps(step_s, number=7).limit("train") == pytest.approx(limit)


def test_varying_step_times_raise_the_limit() -> None:
    monitor = monitor_after_steps(1.0)
    monitor.observe(digests(11, steps=steps(1, 2.5)), 12.5)
    assert monitor.limit("train") == pytest.approx(3 * 2.5 + 0.5)
    for number in range(12, 12 + 64):
        monitor.observe(digests(number, steps=steps(1, 1.0)), number + 1.5)
    assert monitor.limit("train") == pytest.approx(5.5), "one long step among many does not count"


def test_a_pause_of_the_leader_gives_no_negative_standstill() -> None:
    """It reads digests with the time of the pause, and checks with a clock without the pause."""
    monitor = new_monitor(Limits(hang=20.0, init=600.0))
    monitor.observe(digests(1), 5.0)
    monitor.observe(digests(1, still_s=34.5), 76.5)
    hang = monitor.hang(76.5 - 42.0)
    assert hang is not None
    assert hang.stalled_s == 34.5


@pytest.mark.parametrize("phase", ["init", "compile", "train"])
def test_before_the_first_step_the_init_timeout_counts(phase: Phase) -> None:
    assert new_monitor(Limits(hang=None, init=42.0)).limit(phase) == 42.0


def test_a_rank_that_reports_during_start_up_does_not_hang() -> None:
    """Packing data may take hours."""
    monitor = new_monitor(Limits(hang=None, init=60.0), ranks=1)
    for minute in range(1, 10):
        now = minute * 59.0
        monitor.observe([digest(0, 0, phase="init", age_s=1.0, still_s=now, loss=None)], now)
        assert monitor.hang(now) is None
    for waited, hung in ((58.0, False), (60.0, True)):
        silent = digest(0, 0, phase="init", age_s=1 + waited, still_s=now + waited, loss=None)
        monitor.observe([silent], now + waited)
        assert (monitor.hang(now + waited) is not None) == hung


@pytest.mark.parametrize(
    ("phase", "limit"),
    [
        ("train", 5.0),
        ("init", 600.0),
        ("compile", 600.0),
        ("data", 600.0),
        ("checkpoint", 900.0),
        ("eval", 900.0),
        ("write", 900.0),
        ("profile", 900.0),
        ("exit", 120.0),
    ],
)
def test_a_fixed_hang_timeout_replaces_only_the_limit_of_steps(phase: Phase, limit: float) -> None:
    assert monitor_after_steps(60.0, limits=Limits(hang=5.0, init=600.0)).limit(phase) == limit


def test_a_long_hang_timeout_stretches_checkpoints_too() -> None:
    assert new_monitor(Limits(hang=5000.0, init=600.0)).limit("checkpoint") == 5000.0


def test_a_checkpoint_timeout_applies_only_to_checkpoints() -> None:
    monitor = monitor_after_steps(60.0, limits=Limits(hang=None, init=600.0, checkpoint=2.0))
    assert (monitor.limit("checkpoint"), monitor.limit("eval")) == (2.0, 900.0)
    now = 700.0
    monitor.observe([digest(rank, 10, phase="checkpoint", still_s=1.9) for rank in range(4)], now)
    assert monitor.hang(now) is None
    monitor.observe([digest(rank, 10, phase="checkpoint", still_s=2.1) for rank in range(4)], now)
    hang = monitor.hang(now)
    assert hang is not None
    assert (hang.phase, hang.limit_s) == ("checkpoint", 2.0)


# Hangs


def test_a_hang_is_over_when_one_rank_moves_again() -> None:
    monitor = monitor_after_steps(2.0)
    no_progress(monitor, 30.7, 20.0, 0, 1, 2, 3)
    hang = monitor.hang(30.7)
    assert hang is not None
    waits = digest(0, 10, still_s=11.5)
    left = digest(1, 10, ended=True)
    continues = digest(3, 11)
    monitor.observe([waits, left], 31.5)
    assert monitor.hang_over(hang, [waits, left], 31.5) is None
    monitor.observe([waits, continues], 31.5)
    over = HangOver(attempt=1, rank=3, step=11, phase="train")
    assert monitor.hang_over(hang, [waits, continues], 31.5) == over
    assert monitor.hang(31.5) is None


def test_a_hang_is_no_progress_for_longer_than_the_limit() -> None:
    monitor = monitor_after_steps(2.0)
    no_progress(monitor, 30.5, 20.0, 0, 1, 2, 3)
    assert monitor.hang(30.7) is None
    no_progress(monitor, 30.6, 20.0, 0, 1, 2, 3)
    hang = monitor.hang(30.7)
    assert hang is not None
    assert hang.stalled_s == pytest.approx(10.7)
    assert replace(hang, stalled_s=10.7) == HangDetected(
        attempt=1, phase="train", step=10, stalled_s=10.7, limit_s=10.5, behind=()
    )


def test_silence_without_a_report_is_not_a_hang() -> None:
    """A late digest, or a leader without a processor, is no evidence of a hang."""
    monitor = monitor_after_steps(1.0)
    assert monitor.hang(16.0) is None
    no_progress(monitor, 16.0, 10.0, 0, 1, 2)
    assert monitor.hang(16.0) is None, "rank 3 may have moved"
    no_progress(monitor, 16.2, 10.0, 3)
    assert monitor.hang(16.2) is not None


def test_waiting_for_a_report_has_a_limit() -> None:
    monitor = monitor_after_steps(1.0)
    assert monitor.hang(20.0) is None
    assert monitor.hang(20.1) is not None


def test_ranks_that_never_came_up_hang_after_the_init_timeout() -> None:
    monitor = new_monitor()
    assert monitor.hang(600.0) is None
    hang = monitor.hang(600.1)
    assert hang is not None
    assert (hang.phase, hang.step, hang.behind) == ("init", 0, ())


def test_ranks_that_are_behind_are_named() -> None:
    monitor = monitor_after_steps(1.0)
    monitor.observe([digest(rank, 11) for rank in (0, 1, 3)], 11.0)
    monitor.observe([digest(rank, 11, still_s=9.0) for rank in (0, 1, 3)], 20.0)
    monitor.observe([digest(2, 10, still_s=10.0)], 20.0)
    hang = monitor.hang(20.0)
    assert hang is not None
    assert (hang.step, hang.behind) == (11, (2,))


def test_one_rank_that_moves_is_progress() -> None:
    monitor = monitor_after_steps(1.0)
    monitor.observe([digest(3, 11)], 14.0)
    no_progress(monitor, 19.0, 10.0, 0, 1, 2)
    no_progress(monitor, 19.0, 14.0, 3)
    assert monitor.hang(19.0) is None


def test_reports_without_progress_do_not_count() -> None:
    monitor = monitor_after_steps(1.0)
    for now in range(11, 17):
        assert monitor.hang(now - 0.5) is None
        no_progress(monitor, float(now), 10.0, 0, 1, 2, 3)
    hang = monitor.hang(16.2)
    assert hang is not None
    assert hang.stalled_s == pytest.approx(6.2)


def test_while_one_rank_saves_the_others_may_wait_longer() -> None:
    monitor = monitor_after_steps(1.0)
    monitor.observe([digest(2, 10, phase="checkpoint")], 11.0)
    no_progress(monitor, 911.0, 10.0, 0, 1, 3)
    assert monitor.hang(911.0) is None
    no_progress(monitor, 911.5, 10.0, 0, 1, 3)
    monitor.observe([digest(2, 10, phase="checkpoint", still_s=900.5)], 911.5)
    hang = monitor.hang(911.5)
    assert hang is not None
    assert hang.phase == "checkpoint"
    monitor.observe([digest(2, 10)], 912.0)
    no_progress(monitor, 917.0, 10.0, 0, 1, 3)
    no_progress(monitor, 917.0, 912.0, 2)
    assert monitor.hang(917.0) is None


def test_ranks_that_ended_are_not_waited_for() -> None:
    monitor = monitor_after_steps(1.0)
    monitor.observe([digest(0, 9, ended=True), digest(1, 10, phase="checkpoint", ended=True)], 10.0)
    no_progress(monitor, 30.0, 10.0, 2, 3)
    hang = monitor.hang(30.0)
    assert hang is not None
    assert (hang.phase, hang.behind) == ("train", ())
    monitor.observe([digest(rank, 10, ended=True) for rank in (2, 3)], 31.0)
    assert monitor.hang(1e9) is None


def test_a_late_report_counts_from_the_time_it_was_made() -> None:
    """The digest of a host that was cut off contains the standstill of its ranks."""
    monitor = monitor_after_steps(1.0)
    no_progress(monitor, 19.0, 10.0, 1, 2, 3)
    monitor.observe([digest(0, 11, still_s=8.0)], 19.0)
    hang = monitor.hang(19.0)
    assert hang is not None
    assert hang.stalled_s == 8.0


def test_ranks_of_another_world_are_not_counted() -> None:
    monitor = monitor_after_steps(1.0)
    assert monitor.observe([digest(99, 11)], 11.0) is None
    assert monitor.step == 10


# Checkpoints


def test_a_checkpoint_that_takes_much_longer_than_earlier_ones_is_slow() -> None:
    monitor, now, slow_saves = monitor_after_steps(1.0), 10.0, []
    for step, took_s in ((11, 4.0), (12, 5.0), (13, 4.0), (14, 9.0), (15, 20.0)):
        monitor.observe([digest(0, step, phase="checkpoint", still_s=0.5)], now + 0.5)
        now += took_s
        monitor.observe([digest(0, step, still_s=0.25)], now + 0.25)
        slow_saves += [one for one in monitor.changes(now) if isinstance(one, CheckpointSlow)]
        now += 1.0
    assert slow_saves == [CheckpointSlow(attempt=1, step=15, took_s=20.0, usual_s=4.5)]


def test_a_save_is_not_called_slow_before_a_few_are_known() -> None:
    monitor, now = monitor_after_steps(1.0), 10.0
    for step, took_s in ((11, 1.0), (12, 60.0)):
        monitor.observe([digest(0, step, phase="checkpoint")], now)
        now += took_s
        monitor.observe([digest(0, step)], now)
    assert not any(isinstance(one, CheckpointSlow) for one in monitor.changes(now))


# Progress


def test_the_first_step_is_recorded_at_once_and_then_one_in_thirty_seconds() -> None:
    monitor = new_monitor()
    assert monitor.observe(digests(0, phase="init", loss=None), 1.0) is None
    assert monitor.observe(digests(0, loss=None), 2.0) is None
    assert monitor.observe(digests(1), 3.0) == reached(1, 2.5)
    recorded = [
        now for now in range(4, 100) if monitor.observe(digests(now), float(now)) is not None
    ]
    assert recorded == [33, 63, 93]


def test_a_step_is_recorded_once() -> None:
    monitor = new_monitor()
    assert monitor.observe(digests(1)[:2], 1.0) is not None
    assert monitor.observe(digests(1)[2:], 40.0) is None


def test_the_newest_step_of_a_digest_counts_whatever_its_order() -> None:
    monitor = monitor_after_steps(1.0)
    progress = monitor.observe([digest(0, 42), digest(1, 41)], 42.0)
    assert progress is not None
    assert (progress.step, monitor.step) == (42, 42)


def test_a_loss_that_is_not_finite_is_reported_as_none_and_counts_as_progress() -> None:
    monitor = new_monitor()
    assert monitor.observe(digests(20, loss=None), 1.0) is None, (
        "this is the step from which the ranks resumed"
    )
    assert monitor.observe(digests(21, loss=None), 2.0) == reached(21, None)


def test_steps_that_come_with_the_end_of_a_short_program_are_progress() -> None:
    """A program that trains for half a second, and reports no loss, is in one digest."""
    monitor = new_monitor()
    monitor.observe(digests(0, phase="init", loss=None), 0.5)
    ended = digests(6, phase="exit", loss=None, steps=steps(4, 0.4))
    assert monitor.observe(ended, 1.5) == reached(6, None)


def test_a_program_that_resumes_at_its_last_step_makes_no_progress() -> None:
    monitor = new_monitor()
    monitor.observe(digests(6, phase="init", loss=None), 0.5)
    assert monitor.observe(digests(6, phase="exit", loss=None), 1.5) is None


def test_the_longest_step_between_two_digests_is_known() -> None:
    monitor = new_monitor()
    monitor.observe(digests(0), 0.0)
    monitor.observe(digests(1), 3.0)
    assert monitor.step_s is None, "an attempt's first step is slower than all others"
    monitor.observe(digests(5, steps=steps(4, 1.0, longest_s=0.4)), 4.0)
    assert list(monitor.durations) == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert monitor.step_s == pytest.approx(0.2)


def test_of_many_steps_the_longest_and_the_mean_of_the_rest_are_known() -> None:
    monitor = new_monitor()
    monitor.observe(digests(0), 0.0)
    monitor.observe(digests(1), 3.0)
    times = StepTimes(count=6, total_s=2.0, longest_s=0.8, next_s=(0.5, 0.3))
    monitor.observe(digests(7, steps=times), 4.0)
    assert sorted(monitor.durations) == pytest.approx([0.4 / 3] * 3 + [0.3, 0.5, 0.8])


def test_many_steps_at_once_keep_the_window_small() -> None:
    monitor = new_monitor()
    monitor.observe(digests(0), 0.0)
    monitor.observe(digests(10_000, steps=steps(10_000, 10.0)), 10.0)
    assert len(monitor.durations) == 256


# Health


def test_health_is_reported_only_when_it_changes() -> None:
    monitor = monitor_after_steps(2.0)
    monitor.observe(digests(10)[:3], 20.0)
    assert monitor.changes(26.0) == ()
    monitor.observe(digests(10)[:3], 27.0)
    assert monitor.changes(27.0) == (changed("slow", 7.0, (3, 3)),)
    assert monitor.changes(28.0) == ()
    monitor.observe(digests(10)[:3], 31.0)
    assert monitor.changes(31.0) == (changed("silent", 11.0, (3, 3)),)
    monitor.observe([digest(3, 11, age_s=0.5)], 32.0)
    assert monitor.changes(32.0) == (changed("ok", 0.5, (3, 3)),)


def test_a_late_report_does_not_reset_the_age_of_a_rank() -> None:
    monitor = monitor_after_steps(2.0)
    monitor.observe([digest(3, 10, age_s=9.0)], 21.0)
    assert monitor.changes(21.0) == ()


@pytest.mark.parametrize("phase", ["init", "checkpoint"])
def test_a_rank_that_saves_or_starts_is_not_slow(phase: Phase) -> None:
    monitor = monitor_after_steps(0.1)
    monitor.observe(digests(11, phase=phase), 2.0)
    assert monitor.changes(200.0) == ()
    assert {getattr(one, "health", None) for one in monitor.changes(500.0)} == {"silent"}


def test_before_the_first_duration_no_rank_is_slow() -> None:
    monitor = new_monitor()
    monitor.observe(digests(0), 1.0)
    assert monitor.changes(100.0) == ()


def test_the_health_of_ended_ranks_is_not_reported() -> None:
    monitor = monitor_after_steps(1.0)
    monitor.observe(digests(10, ended=True), 11.0)
    assert monitor.changes(1e6) == ()


def test_sixteen_thousand_ranks_are_watched() -> None:
    ranks = 16_384
    monitor = new_monitor(ranks=ranks)
    for number in range(3):
        for first in range(0, ranks, 8):
            host = [digest(first + n, number, steps=steps(9, 9.0)) for n in range(8)]
            monitor.observe(host, float(number))
    assert (monitor.step, monitor.step_s) == (2, 1.0)
    assert monitor.changes(2.0) == ()
    monitor.observe([digest(n, 3) for n in range(ranks) if n != 4711], 3.0)
    no_progress(monitor, 14.0, 3.0, *range(ranks))
    hang = monitor.hang(14.0)
    assert hang is not None
    assert monitor.step == 3
    monitor.observe([digest(4711, 2, still_s=12.0)], 14.0)
    hang = monitor.hang(14.0)
    assert hang is not None
    assert hang.behind == (4711,)
    assert monitor.changes(25.0) == (changed("silent", 11.0, (0, ranks - 1)),)
    monitor.observe([digest(n, 3) for n in range(ranks) if n != 4711], 26.0)
    back = changed("ok", 0.0, (0, 4710), (4712, ranks - 1))
    assert monitor.changes(26.0) == (back,)

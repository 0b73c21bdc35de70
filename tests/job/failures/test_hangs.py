"""When a standstill is taken for a hang, over many steps in virtual time."""

from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.detect.heartbeat_monitor import HeartbeatMonitor, Limits
from tests.job.digests import Line

LIMITS = Limits(hang=None, init=600.0)
STEP_S = 0.1
PAUSE_S = 20 * STEP_S


def line(seed: int, *, hosts: int = 2, latency_s: float = 0.0, look_s: float | None = None) -> Line:
    watch = HeartbeatMonitor(1, range(hosts), LIMITS, 0.0)
    job = Line(watch, hosts, Random(seed), latency_s=latency_s, look_s=look_s)
    job.all_beat(0)
    return job


def step(job: Line, number: int, seconds: float) -> None:
    job.run_to(job.now + seconds)
    job.all_beat(number)


# Where a pause is announced before it begins it has a clock of its own


def pause(job: Line, number: int, phase: Phase | None) -> None:
    """One rank is held up, and the others wait for it; without a `phase` it does not say why."""
    rank = job.random.randrange(job.hosts)
    if phase is not None:
        job.beat(rank, number, phase)
    job.run_to(job.now + PAUSE_S)
    if phase is not None:
        job.beat(rank, number, "train")


def paused_job(steps: int, *, announced: bool) -> Line:
    """Each few hundred steps something takes as long as 20 of them."""
    job = line(7, latency_s=0.05)
    phases: tuple[Phase, ...] = ("checkpoint", "eval", "compile", "write", "profile")
    for number in range(1, steps + 1):
        step(job, number, STEP_S * job.random.uniform(0.9, 1.1))
        if number > 20 and job.random.random() < 1 / 300:
            pause(job, number, job.random.choice(phases) if announced else None)
        if job.hang is not None:
            break
    return job


def test_no_hang_in_100_000_steps_with_pauses_of_20_steps() -> None:
    job = paused_job(100_000, announced=True)
    assert job.hang is None
    assert job.watch.step >= 99_990
    assert job.now > 100_000 * STEP_S + 250 * PAUSE_S, "there were hundreds of pauses"
    assert job.watch.limit("train") < 1.1, "and the limit is that of the steps, as tight as ever"


def test_the_same_pause_unannounced_is_a_hang() -> None:
    assert paused_job(100_000, announced=False).hang is not None


# A steady job


@pytest.mark.parametrize("step_s", [0.02, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("hosts", [1, 3])
def test_a_hang_of_a_steady_job_is_found_within_five_steps_and_a_second(
    step_s: float, hosts: int
) -> None:
    for seed in range(8):
        job = line(seed, hosts=hosts, latency_s=0.05, look_s=0.25)
        for number in range(1, 40):
            step(job, number, step_s * job.random.uniform(0.9, 1.1))
        since = job.now
        job.run_to(since + 6 * step_s + 2)
        assert job.hang is not None
        at, found = job.hang
        assert at - since <= 5 * 1.05 * step_s + 1.0, "the median differs from step_s by little"
        assert found.phase == "train"
        assert found.stalled_s == pytest.approx(at - since, abs=0.06)


def test_a_step_that_hangs_behind_a_checkpoint_is_found_as_fast() -> None:
    """Pauses that were announced are in no step: they do not stretch the limit."""
    job = line(3, look_s=0.25)
    for number in range(1, 40):
        step(job, number, 0.3)
        job.all_beat(number, "checkpoint")
        job.run_to(job.now + 6.0)
        job.all_beat(number)
    since = job.now
    job.run_to(since + 30.0)
    assert job.hang is not None
    assert job.hang[0] - since <= 5 * 0.3 + 1.0


# A machine whose steps vary


@given(
    seed=st.integers(0, 2**32),
    step_s=st.floats(0.02, 5.0),
    spread=st.floats(1.0, 10.0),
    often=st.floats(0.1, 1.0),
    latency_s=st.floats(0.0, 1.5),
)
@settings(max_examples=25, deadline=None)
def test_steps_of_up_to_four_medians_are_no_hang_however_they_vary(
    seed: int, step_s: float, spread: float, often: float, latency_s: float
) -> None:
    """So do steps on a machine with too few processors; and digests are late there.

    A step that is longer than five medians and than all that was seen cannot be told from a hang.
    """
    job = line(seed, latency_s=latency_s)
    lengths = [step_s]
    for number in range(1, 400):
        slow = job.random.random() < often
        drawn = step_s * (job.random.uniform(1.0, spread) if slow else 1.0)
        lengths.append(min(drawn, 4 * median(lengths[-64:])))
        step(job, number, lengths[-1])
    assert job.hang is None, job.hang


@given(
    seed=st.integers(0, 2**32),
    step_s=st.floats(0.1, 5.0),
    spread=st.floats(1.0, 30.0),
    often=st.floats(0.02, 1.0),
    latency_s=st.floats(0.0, 1.5),
)
@settings(max_examples=12, deadline=None)
def test_a_step_little_longer_than_those_that_were_told_is_no_hang(
    seed: int, step_s: float, spread: float, often: float, latency_s: float
) -> None:
    """Up to 2.5 times the fifth longest of 64; what is told of a step comes seconds after it."""
    job = line(seed, latency_s=latency_s)
    done: list[tuple[float, float]] = [(0.0, step_s)]
    for number in range(1, 400):
        slow = job.random.random() < often
        drawn = step_s * (job.random.uniform(1.0, spread) if slow else 1.0)
        told = sorted([took for at, took in done if at < job.now - 3.0][-64:]) or [0.0]
        usual = 4 * median([took for _, took in done[-64:]])
        step(job, number, min(drawn, max(usual, 2.5 * told[-min(5, len(told))])))
        done.append((job.now, job.now - done[-1][0]))
    assert job.hang is None, job.hang


def test_long_steps_that_one_digest_tells_together_are_each_known() -> None:
    """Six long ones in three seconds, among short ones: a seventh that is twice as long is none."""
    job = line(5, hosts=1, look_s=0.25)
    lengths = (*[0.02] * 300, *[0.45, 0.45, *[0.02] * 5] * 3, *[0.02] * 60, 1.1)
    for number, length in enumerate(lengths, 1):
        step(job, number, length)
    assert job.hang is None, job.hang

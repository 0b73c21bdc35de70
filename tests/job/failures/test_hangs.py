"""When a pause between steps counts as a hang, over many steps in virtual time."""

from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndctl.rank.phases import Phase
from orchestrator.detect.heartbeat_monitor import HeartbeatMonitor, Limits
from tests.job.virtual_ranks import VirtualRanks

LIMITS = Limits(hang=None, init=600.0)
STEP_S = 0.1
PAUSE_S = 20 * STEP_S


def virtual_job(
    seed: int, *, hosts: int = 2, latency_s: float = 0.0, check_s: float | None = None
) -> VirtualRanks:
    watch = HeartbeatMonitor(1, range(hosts), LIMITS, 0.0)
    job = VirtualRanks(watch, hosts, Random(seed), latency_s=latency_s, check_s=check_s)
    job.all_beat(0)
    return job


def step(job: VirtualRanks, number: int, seconds: float) -> None:
    job.run_to(job.now + seconds)
    job.all_beat(number)


# A pause that a rank announces (checkpoint, eval) has its own time limit


def pause(job: VirtualRanks, number: int, phase: Phase | None) -> None:
    """One rank pauses and the others wait for it. It announces `phase`, or nothing if None."""
    rank = job.random.randrange(job.hosts)
    if phase is not None:
        job.beat(rank, number, phase)
    job.run_to(job.now + PAUSE_S)
    if phase is not None:
        job.beat(rank, number, "train")


def paused_job(steps: int, *, announced: bool) -> VirtualRanks:
    """Each few hundred steps there is a pause as long as 20 steps."""
    job = virtual_job(7, latency_s=0.05)
    phases: tuple[Phase, ...] = ("checkpoint", "eval", "compile", "data", "write", "profile")
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
    assert job.watch.limit("train") < 1.1, "the limit is still that of normal steps"


def test_an_unannounced_pause_of_20_steps_is_a_hang() -> None:
    assert paused_job(100_000, announced=False).hang is not None


# A steady job


@pytest.mark.parametrize("step_s", [0.02, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("hosts", [1, 3])
def test_a_hang_of_a_steady_job_is_found_within_five_steps_and_a_second(
    step_s: float, hosts: int
) -> None:
    for seed in range(8):
        job = virtual_job(seed, hosts=hosts, latency_s=0.05, check_s=0.25)
        for number in range(1, 40):
            step(job, number, step_s * job.random.uniform(0.9, 1.1))
        since = job.now
        job.run_to(since + 6 * step_s + 2)
        assert job.hang is not None
        at, found = job.hang
        assert at - since <= 5 * 1.05 * step_s + 1.0, "the median step is at most 1.05 * step_s"
        assert found.phase == "train"
        assert found.stalled_s == pytest.approx(at - since, abs=0.06)


def test_a_hang_after_checkpoints_is_found_as_fast() -> None:
    """Announced pauses count to no step, so they do not raise the limit."""
    job = virtual_job(3, check_s=0.25)
    for number in range(1, 40):
        step(job, number, 0.3)
        job.all_beat(number, "checkpoint")
        job.run_to(job.now + 6.0)
        job.all_beat(number)
    since = job.now
    job.run_to(since + 30.0)
    assert job.hang is not None
    assert job.hang[0] - since <= 5 * 0.3 + 1.0


# Steps of varying length


@given(
    seed=st.integers(0, 2**32),
    step_s=st.floats(0.02, 5.0),
    spread=st.floats(1.0, 10.0),
    often=st.floats(0.1, 1.0),
    latency_s=st.floats(0.0, 1.5),
)
@settings(max_examples=25, deadline=None)
def test_varying_steps_of_up_to_four_medians_are_no_hang(
    seed: int, step_s: float, spread: float, often: float, latency_s: float
) -> None:
    """As on a machine with too few processors, where digests are late too.

    A step longer than five medians and longer than all earlier steps looks like a hang.
    """
    job = virtual_job(seed, latency_s=latency_s)
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
def test_a_step_not_much_longer_than_reported_ones_is_no_hang(
    seed: int, step_s: float, spread: float, often: float, latency_s: float
) -> None:
    """Up to 2.5 times the fifth longest of 64 steps; a step is reported seconds after its end."""
    job = virtual_job(seed, latency_s=latency_s)
    done: list[tuple[float, float]] = [(0.0, step_s)]
    for number in range(1, 400):
        slow = job.random.random() < often
        drawn = step_s * (job.random.uniform(1.0, spread) if slow else 1.0)
        known = sorted([took for at, took in done if at < job.now - 3.0][-64:]) or [0.0]
        usual = 4 * median([took for _, took in done[-64:]])
        step(job, number, min(drawn, max(usual, 2.5 * known[-min(5, len(known))])))
        done.append((job.now, job.now - done[-1][0]))
    assert job.hang is None, job.hang


def test_each_of_several_long_steps_in_one_digest_counts() -> None:
    """After six long steps in three seconds, a seventh that is twice as long is no hang."""
    job = virtual_job(5, hosts=1, check_s=0.25)
    lengths = (*[0.02] * 300, *[0.45, 0.45, *[0.02] * 5] * 3, *[0.02] * 60, 1.1)
    for number, length in enumerate(lengths, 1):
        step(job, number, length)
    assert job.hang is None, job.hang

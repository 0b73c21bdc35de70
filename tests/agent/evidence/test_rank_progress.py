"""Step times and standstill of a rank, computed from its heartbeats."""

import math

import pytest

from ndctl.rank.phases import Phase
from orchestrator.agent.evidence.rank_progress import Pace, still_in
from orchestrator.contract.messages.agent_protocol import StepTimes
from orchestrator.contract.messages.rank_messages import Beat


class Rank:
    def __init__(self) -> None:
        self.pace, self.step = Pace(0.0, 0.0), 0
        self.phase: Phase = "init"

    def beat(self, at: float, step: int, phase: Phase, own_s: float | None = None) -> None:
        beat = Beat(attempt=1, rank=0, step=step, phase=phase, own_s=own_s)
        self.pace.beat(self.step, self.phase, beat, at)
        self.step, self.phase = step, phase


@pytest.fixture
def rank() -> Rank:
    """A rank that finished its first step of the attempt at 10 s."""
    rank = Rank()
    rank.beat(4.0, 7, "train")
    rank.beat(10.0, 8, "train")
    return rank


def test_the_first_step_of_an_attempt_is_not_counted(rank: Rank) -> None:
    assert rank.pace.take() is None


def test_steps_are_reported_once_with_the_longest_and_the_own_time(rank: Rank) -> None:
    rank.beat(11.0, 9, "train", own_s=0.25)
    rank.beat(14.0, 10, "train", own_s=0.5)
    assert rank.pace.take() == StepTimes(
        count=2, total_s=4.0, longest_s=3.0, next_s=(1.0,), own_s=0.75
    )
    assert rank.pace.take() is None


@pytest.mark.parametrize("phase", ["checkpoint", "eval", "write"])
def test_a_phase_between_two_steps_counts_to_neither(rank: Rank, phase: Phase) -> None:
    rank.beat(11.0, 9, phase)
    rank.beat(50.0, 9, "train")
    rank.beat(51.0, 10, "train")
    times = rank.pace.take()
    assert times is not None
    assert times.longest_s == 1.0
    assert times.count == (2 if phase == "write" else 1), (
        "a step whose heartbeat says `write` counts"
    )


def test_profiled_steps_are_not_counted(rank: Rank) -> None:
    rank.beat(10.5, 8, "profile")
    rank.beat(20.0, 9, "profile")
    rank.beat(21.0, 9, "write")
    rank.beat(22.0, 9, "train")
    assert rank.pace.take() is None


def test_after_a_lost_heartbeat_its_time_is_divided_between_two_steps(rank: Rank) -> None:
    rank.beat(14.0, 10, "train")
    assert rank.pace.take() == StepTimes(count=2, total_s=4.0, longest_s=2.0, next_s=(2.0,))


def test_the_five_longest_of_many_steps_are_reported(rank: Rank) -> None:
    now = 10.0
    for number in range(100):
        now += (number * 37 % 100) / 1000
        rank.beat(now, 9 + number, "train")
    times = rank.pace.take()
    assert times is not None
    assert times.count == 100
    assert times.total_s == pytest.approx(4.95)
    longest = (times.longest_s, *times.next_s)
    assert longest == pytest.approx((0.099, 0.098, 0.097, 0.096, 0.095))
    assert rank.pace.take() is None


def test_a_standstill_begins_at_the_last_change_of_step_or_phase(rank: Rank) -> None:
    rank.beat(12.0, 8, "train")
    assert rank.pace.still(15.0, 0.0) == 5.0


def test_time_without_a_processor_is_no_standstill(rank: Rank) -> None:
    assert rank.pace.still(12.0, 0.0) == 2.0
    assert rank.pace.still(16.0, 3.5) == 2.5
    assert rank.pace.still(17.0, 3.5) == 3.5


def test_time_without_a_processor_counts_since_the_last_progress(rank: Rank) -> None:
    rank.pace.still(12.0, 1.5)
    rank.pace.still(14.0, 3.0)
    assert rank.pace.starved == 3.0
    rank.beat(15.0, 9, "train")
    assert rank.pace.starved == 0.0
    rank.pace.still(16.0, 9.0)
    assert rank.pace.starved == 1.0, "at most the time that has passed"


def test_a_pause_of_the_agent_is_excused(rank: Rank) -> None:
    rank.pace.excuse(3.0)
    assert rank.pace.still(15.0, 0.0) == 2.0
    rank.pace.excuse(30.0)
    assert rank.pace.still(16.0, 0.0) == 0.0, "at most the standstill so far"


def test_a_standstill_is_reported_at_once_and_only_once() -> None:
    one, two = Rank(), Rank()
    one.beat(1.0, 1, "train")
    two.beat(2.0, 1, "train")
    paces = [one.pace, two.pace]
    assert still_in(paces, 5.0, 4.0) == 3.0, "the rank that progressed last counts"
    for pace in paces:
        pace.still(7.1, 0.0)
    assert still_in(paces, 5.0, 7.1) == math.inf
    two.beat(8.0, 2, "train")
    assert still_in(paces, 5.0, 8.0) == 5.0
    assert still_in([], 5.0, 8.0) == math.inf

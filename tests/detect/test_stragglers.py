"""Which ranks delay their peers by their own work, for how long, and the cost."""

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.agent_protocol import RankDigest, StepTimes
from orchestrator.contract.messages.events import StragglerFound, StragglerGone
from orchestrator.detect.stragglers import Change, Stragglers, compare, cost, roles_of

FOUR = (tuple(range(4)),)


def digest(rank: int, own_s: float | None, step_s: float = 1.0, steps: int = 5) -> RankDigest:
    times = StepTimes(
        count=steps,
        total_s=steps * step_s,
        longest_s=step_s,
        own_s=None if own_s is None else steps * own_s,
    )
    return RankDigest(
        rank=rank,
        pid=1,
        step=1,
        phase="train",
        age_s=0.0,
        still_s=0.0,
        loss=2.0,
        tokens_per_second=1000.0,
        steps=times,
    )


def new_stragglers(roles: tuple[tuple[int, ...], ...] = FOUR) -> Stragglers:
    return Stragglers(1, roles, lambda rank: f"host-{rank}", 0.0)


class Rounds:
    """Passes one round of digests after another."""

    def __init__(self, roles: tuple[tuple[int, ...], ...] = FOUR) -> None:
        self.seen, self.now = new_stragglers(roles), 0.0

    def round(
        self, own_s: Mapping[int, float], step_s: float = 1.0, steps: int = 5
    ) -> tuple[Change, ...]:
        self.seen.observe([digest(rank, own, step_s, steps) for rank, own in own_s.items()])
        self.now += steps * step_s
        return self.seen.changes(self.now)


FAST = dict.fromkeys(range(4), 0.1)
SLOW = FAST | {2: 0.5}


def test_a_rank_that_is_slow_for_three_rounds_is_named_and_its_peers_are_not() -> None:
    rounds = Rounds()
    assert rounds.round(SLOW) == ()
    assert rounds.round(SLOW) == ()
    (found,) = rounds.round(SLOW)
    assert isinstance(found, StragglerFound)
    assert (found.rank, found.host, found.steps) == (2, "host-2", 15)
    assert found.own_s == pytest.approx(0.5)
    assert found.peers_s == pytest.approx(0.1)
    assert found.lost_tokens_per_second == pytest.approx(1000.0 * 0.4 / 0.6)
    assert rounds.round(SLOW) == (), "a straggler is reported once"


def test_a_rank_that_is_slow_from_time_to_time_is_not_named() -> None:
    rounds = Rounds()
    for _ in range(5):
        for own in (SLOW, SLOW, FAST):
            assert rounds.round(own) == ()


def test_a_rank_recovers_after_as_many_rounds() -> None:
    rounds = Rounds()
    for _ in range(3):
        rounds.round(SLOW)
    assert rounds.round(FAST) == ()
    assert rounds.round(FAST | {2: 0.17}) == (), (
        "the delay is below the limit at which a rank is named"
    )
    assert rounds.round(FAST) == ()
    assert rounds.round(FAST) == ()
    (gone,) = rounds.round(FAST)
    assert isinstance(gone, StragglerGone)
    assert gone.rank == 2


def test_a_delay_that_is_a_small_part_of_a_step_is_not_reported() -> None:
    rounds = Rounds()
    for _ in range(10):
        assert rounds.round(FAST | {2: 0.19}) == ()


def test_each_pipeline_stage_is_compared_with_itself() -> None:
    rounds = Rounds(((0, 1), (2, 3)))
    for _ in range(10):
        assert rounds.round({0: 0.1, 1: 0.1, 2: 0.6, 3: 0.6}) == ()
    assert roles_of(Mesh(pp=2, tp=2)) == ((0, 1), (2, 3))


def test_a_rank_without_peers_is_never_slow() -> None:
    rounds = Rounds(((0,), (1,)))
    for _ in range(10):
        assert rounds.round({0: 0.01, 1: 0.9}) == ()


def test_of_two_ranks_the_slower_one_is_named() -> None:
    rounds = Rounds(((0, 1),))
    found = [change for _ in range(3) for change in rounds.round({0: 0.1, 1: 0.4})]
    assert [change.rank for change in found] == [1]


def test_a_round_waits_for_every_ranks_steps_and_for_some_time() -> None:
    seen = new_stragglers()
    for number in range(1, 8):
        seen.observe([digest(rank, 0.1 + 0.4 * (rank == 2)) for rank in (0, 1, 2)])
        assert seen.changes(5.0 * number) == (), "there are no times of rank 3"
    fast = Rounds()
    for _ in range(20):  # steps of 1 ms: all 20 are within one round
        assert fast.round({**dict.fromkeys(range(4), 1e-4), 2: 9e-4}, step_s=1e-3) == ()


def test_a_rank_without_its_own_times_is_not_judged() -> None:
    seen = new_stragglers()
    seen.observe([digest(rank, None) for rank in range(4)])
    assert seen.changes(100.0) == ()


def test_a_slow_host_is_named_with_half_of_all_ranks() -> None:
    assert compare({0: 0.1, 1: 0.1, 2: 0.5, 3: 0.5}, 1.0).slow == {2, 3}


def test_peers_that_differ_much_among_themselves_raise_the_bar() -> None:
    own = dict(enumerate((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)))
    assert compare(own, 1.0).slow == frozenset()


@given(
    own=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=64),
    step_s=st.floats(1e-3, 10.0),
)
def test_never_more_than_half_are_slow(own: list[float], step_s: float) -> None:
    found = compare(dict(enumerate(own)), step_s)
    assert 2 * len(found.slow) <= len(own)
    assert found.slow <= found.over


@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 64), jitter=st.floats(0.0, 0.3))
def test_a_rank_twice_as_slow_is_found_among_peers_with_jitter(
    seed: int, ranks: int, jitter: float
) -> None:
    random, rounds = Random(seed), Rounds((tuple(range(ranks)),))
    named: list[int] = []
    for _ in range(6):
        own = {rank: 0.3 * (1 + jitter * random.random()) for rank in range(ranks)}
        named += [change.rank for change in rounds.round(own | {1: 1.5})]
    assert named == [1]


@pytest.mark.parametrize(("wait_s", "lost"), [(0.0, 0.0), (0.5, 1000.0), (0.2, 250.0), (-1, 0.0)])
def test_the_cost_is_the_rate_lost_by_waiting(wait_s: float, lost: float) -> None:
    assert cost(1000.0, 1.0, wait_s) == pytest.approx(lost)


def test_the_cost_is_at_most_the_whole_rate() -> None:
    assert cost(1000.0, 1.0, 5.0) == pytest.approx(99_000.0)

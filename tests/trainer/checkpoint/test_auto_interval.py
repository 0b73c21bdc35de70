"""How rank 0 computes the interval between saves of `checkpoint.every: auto`."""

import json

import pytest

from orchestrator.contract.checkpoint_interval import Exposure, SavePace
from orchestrator.contract.codec import encode
from orchestrator.contract.files.env import RankEnv
from trainer.checkpoint.auto_interval import AutoInterval


def pace(hosts: int = 2048, **exposure: float) -> AutoInterval:
    given = SavePace(exposure=Exposure(**exposure), every_steps=7)  # type: ignore[arg-type]
    text = json.dumps(encode(given))
    return AutoInterval(RankEnv(world_size=8 * hosts, local_world_size=8, pace=text))


def test_the_interval_follows_from_the_time_that_a_save_stops_training() -> None:
    """16,384 ranks fail every 1.8 h. With 10 s per save: about sqrt(2 x 10 x 6,490) = 360 s."""
    proposal = pace().propose(100, 10.0, 20.0, [], [5.0, 5.0, 5.1], remembers=False)
    assert proposal is not None
    assert proposal.every == pytest.approx(360 / 5, rel=0.05)
    assert "a save costs 10 s, a step takes 5 s" in proposal.why
    assert "one failure per 1.8 h is expected (failures so far: 0)" in proposal.why


def test_only_failures_that_memory_does_not_cover_count_if_there_is_one() -> None:
    """Half of all failures before the first one, so sqrt(2) times the interval. After ten that
    memory covered, one of twelve."""
    fresh = pace().propose(1, 10.0, 20.0, [], [5.0], remembers=True)
    assert fresh is not None
    assert fresh.every == pytest.approx(360 * 2**0.5 / 5, rel=0.05)
    seen = pace(failures=10, in_memory=10, observed_s=36_000.0)
    covered = seen.propose(1, 10.0, 20.0, [], [5.0], remembers=True)
    alone = seen.propose(1, 10.0, 20.0, [], [5.0], remembers=False)
    assert covered is not None
    assert alone is not None
    assert covered.every == pytest.approx(alone.every * 12**0.5, rel=0.05)
    assert "one failure that memory does not cover per" in covered.why
    assert "(failures so far: 10, 0 of them not covered)" in covered.why


def test_the_slowdown_of_steps_during_a_save_is_part_of_its_cost() -> None:
    fast = pace().propose(1, 1.0, 20.0, [5.0, 5.0], [5.0], remembers=False)
    slow = pace().propose(1, 1.0, 20.0, [9.0, 10.0], [5.0], remembers=False)
    assert fast is not None
    assert slow is not None
    assert slow.every == pytest.approx(fast.every * 10**0.5, rel=0.05)


def test_a_job_that_failed_often_saves_more_often() -> None:
    often = pace(failures=15, observed_s=36_000.0).propose(
        1, 10.0, 20.0, [], [1.0], remembers=False
    )
    seldom = pace(failures=0, observed_s=36_000.0).propose(
        1, 10.0, 20.0, [], [1.0], remembers=False
    )
    assert often is not None
    assert seldom is not None
    assert 2 * often.every < seldom.every


def test_the_interval_stays_within_its_bounds_and_the_reason_names_them() -> None:
    dear = pace().propose(1, 600.0, 700.0, [], [1.0], remembers=False)
    assert dear is not None
    assert dear.every == 5400
    assert "bounded: saves may take 10% of the time" in dear.why
    rare = pace(hosts=1).propose(1, 10.0, 20.0, [], [1.0], remembers=False)
    assert rare is not None
    assert rare.every == 3600
    assert "bounded: a failure may cost 3600 s of work" in rare.why
    long = pace().propose(1, 0.01, 500.0, [], [1.0], remembers=False)
    assert long is not None
    assert long.every == 500
    assert "bounded: a save takes as long" in long.why


def test_small_changes_of_the_interval_are_ignored() -> None:
    first = pace().propose(100, 10.0, 20.0, [], [5.0], remembers=False)
    assert first is not None
    assert pace().propose(first.every + 5, 10.0, 20.0, [], [5.0], remembers=False) is None
    assert pace().propose(100, 10.0, 20.0, [], [], remembers=False) is None


def test_an_attempt_starts_with_the_interval_of_the_previous_one() -> None:
    assert pace().every == 7
    assert AutoInterval(RankEnv()).every is None

"""Random kills of a job with copies of checkpoints in memory on two partners; see
`memory_kills.py`, which takes the number of kills as an argument."""

from pathlib import Path

import pytest

from tests.e2e.kills.memory_kills import check

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("e2e"),
    pytest.mark.timeout(3600),
]

KILLS, SEED = 20, 20261128


def test_after_random_kills_all_losses_are_equal_and_few_steps_are_lost(tmp_path: Path) -> None:
    recoveries = check(tmp_path, KILLS, SEED).recoveries
    assert sum(one.in_memory for one in recoveries) > KILLS / 2
    # A step takes milliseconds here, and copies arrive some steps later.
    assert sum(one.lost_steps for one in recoveries if one.in_memory) < 10 * KILLS

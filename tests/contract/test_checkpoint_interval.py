"""The checkpoint interval: Daly's formula, its limits, and the failure rate."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.checkpoint_interval import (
    HOST_MTBF_S,
    LONGEST_S,
    Exposure,
    daly_s,
    interval_of,
)


def test_the_optimum_is_youngs_formula_if_saves_are_cheap() -> None:
    assert daly_s(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=0.01)
    assert daly_s(300.0, 100.0) == 100.0


@given(cost=st.floats(0.01, 1e4), mtbf=st.floats(1.0, 1e8))
def test_the_optimum_wastes_no_more_than_nearby_intervals(cost: float, mtbf: float) -> None:
    """Compared by Daly's exact time to solution, which the formula approximates."""
    if cost > mtbf / 2:
        return  # almost no work would be done

    def waste(interval: float) -> float:
        return math.expm1(min(500.0, (interval + cost) / mtbf)) / interval

    best = daly_s(cost, mtbf)
    assert all(waste(best) <= 1.001 * waste(factor * best) for factor in (0.5, 0.8, 1.25, 2.0))


@given(cost=st.floats(0.0, 1e4), write=st.floats(0.0, 1e4), mtbf=st.floats(1.0, 1e8))
def test_the_interval_keeps_its_limits_and_names_them(
    cost: float, write: float, mtbf: float
) -> None:
    found = interval_of(cost, write, mtbf)
    assert found.seconds >= 0.999 * max(write, 9 * cost)
    assert found.seconds <= 1.001 * max(LONGEST_S, write, 9 * cost)
    assert bool(found.bound) == (found.seconds != daly_s(cost, mtbf))


def test_the_prior_failure_rate_gives_way_to_the_observed_one() -> None:
    assert Exposure().mtbf_s(hosts=100) == HOST_MTBF_S / 100
    seen = Exposure(failures=200, observed_s=200 * 3600.0)
    assert seen.mtbf_s(hosts=100) == pytest.approx(3600, rel=0.7)
    assert seen.mtbf_s(hosts=2000) == pytest.approx(3600, rel=0.04)
    assert Exposure().mtbf_s(100, further_s=1e6) > Exposure().mtbf_s(100)

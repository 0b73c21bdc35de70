from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.forecast import closed
from orchestrator.forecast.history import Account, history
from orchestrator.forecast.many import best_of, expect, forecast
from orchestrator.forecast.rates import DAY_S
from orchestrator.forecast.setting import Hazard, Setting
from tests.forecast.settings import CRASH, published, setting


class Script(Random):
    """Draws exponential times from a list, then never again."""

    def __init__(self, *times: float) -> None:
        super().__init__(0)
        self.times = list(times)

    def expovariate(self, lambd: float = 1.0) -> float:
        return self.times.pop(0) if self.times else 1e12


def course(chosen: Setting, *times: float) -> Account:
    from orchestrator.forecast.history import _History

    return _History(chosen, Script(*times)).run()


ONE = setting(
    hazards=(replace(CRASH, takes_host=False),),
    horizon_s=10_000.0,
    interval_s=100.0,
    stall_s=10.0,
    write_s=50.0,
)
"""Saves begin at 100, 210, 320 …, and are complete 50 s later."""


@pytest.mark.parametrize(
    ("at", "lost", "stalled"),
    [
        (90.0, 90.0, 0.0),
        (149.0, 139.0, 10.0),  # the first save has begun, and is of no use yet
        (151.0, 41.0, 10.0),
        (215.0, 100.0, 15.0),  # in the stall of the second, with the first one complete
        (300.0, 80.0, 20.0),
    ],
)
def test_a_failure_costs_what_was_done_since_the_last_complete_save(
    at: float, lost: float, stalled: float
) -> None:
    seconds = course(replace(ONE, horizon_s=at + 182.0), at).seconds
    assert seconds["lost work"] == pytest.approx(lost)
    assert seconds["checkpoint stalls"] == pytest.approx(stalled)
    assert (seconds["detection"], seconds["restart"]) == (2.0, 180.0)
    assert sum(seconds.values()) == pytest.approx(at + 182.0)


def test_a_failure_while_the_job_recovers_begins_the_recovery_anew() -> None:
    # at 90; 100 s later, in the restart; then never again
    account = course(replace(ONE, horizon_s=90.0 + 100.0 + 182.0), 90.0, 100.0)
    assert account.failures == 2
    assert account.seconds["restart"] == pytest.approx(98.0 + 180.0)
    assert account.seconds["detection"] == pytest.approx(4.0)


def test_what_is_planned_costs_a_save_and_a_restart_and_no_work() -> None:
    planned = Hazard(name="planned", per_s=1.0, detection_s=0.0, takes_host=False, planned=True)
    account = course(replace(ONE, hazards=(planned,), horizon_s=1000.0), 90.0)
    assert account.failures == 0
    assert account.seconds["lost work"] == 0.0
    assert account.seconds["restart"] == 180.0
    assert account.seconds["queue"] == 0.0


def test_without_a_spare_the_job_waits_for_whichever_host_comes_first() -> None:
    chosen = replace(ONE, hazards=(CRASH,), spares=0, reserve=1, horizon_s=5000.0)
    # failure at 90; the next one never; repaired after 1,000 s, granted by the scheduler after 300
    waited = course(chosen, 90.0, 1e12, 1000.0, 300.0).seconds["queue"]
    assert waited == pytest.approx(298.0)  # of which 2 s were needed to notice
    waited = course(replace(chosen, reserve=0), 90.0, 1e12, 1000.0, 300.0).seconds["queue"]
    assert waited == pytest.approx(998.0)
    spared = course(replace(chosen, spares=1), 90.0, 1e12, 1000.0, 300.0)
    assert (spared.seconds["queue"], spared.waits) == (0.0, 0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    mtbf=st.floats(300, 1e6),
    interval=st.floats(1, 1e5),
    write=st.floats(0.1, 1e4),
    spares=st.integers(0, 5),
    reserve=st.integers(0, 5),
)
def test_every_second_is_accounted_for_and_a_seed_is_one_history(
    seed: int, mtbf: float, interval: float, write: float, spares: int, reserve: int
) -> None:
    chosen = setting(
        hazards=(replace(CRASH, per_s=1 / mtbf),),
        horizon_s=DAY_S,
        interval_s=interval,
        stall_s=write / 3,
        write_s=write,
        spares=spares,
        reserve=reserve,
    )
    account = history(chosen, seed)
    assert sum(account.seconds.values()) == pytest.approx(chosen.horizon_s)
    assert all(value >= -1e-6 for value in account.seconds.values())
    assert history(chosen, seed) == account


@pytest.mark.parametrize("interval", [60.0, 600.0, 3000.0])
@pytest.mark.parametrize("spares", [0, 3])
def test_histories_and_closed_form_agree(interval: float, spares: int) -> None:
    chosen = setting(interval_s=interval, spares=spares, horizon_s=60 * DAY_S)
    found = expect(chosen, range(30))
    assert found.effective == pytest.approx(found.closed, abs=0.008)
    assert found.low < found.effective < found.high


def test_they_agree_for_the_published_classes_as_well() -> None:
    found = expect(published(2048, "llama3", horizon_s=54 * DAY_S), range(10))
    assert found.effective == pytest.approx(found.closed, abs=0.005)


def test_the_best_interval_is_better_than_others_in_histories_too() -> None:
    found = forecast(setting(), histories=10, seed=3, step_s=5.0)
    best = max(found.around, key=lambda one: one.effective)
    assert best.setting.interval_s == pytest.approx(found.best.setting.interval_s, rel=1.01)
    assert found.best.effective > found.expected.effective
    assert found.best.setting.interval_s % 5.0 == 0
    assert forecast(setting(), histories=10, seed=3, step_s=5.0) == found


def test_spares_are_worth_having_where_the_queue_is_long_and_not_where_it_is_short() -> None:
    slow, fast = setting(queue_s=6 * 3600.0), setting(queue_s=1.0)
    assert best_of(slow, 1.0).spares > best_of(fast, 1.0).spares == 0
    held = best_of(slow, 1.0)
    for spares in (0, held.spares + 3):
        other = replace(held, spares=spares, reserve=held.reserve + held.spares - spares)
        assert worth(other) < worth(held)


def worth(chosen: Setting) -> float:
    share = chosen.hosts / (chosen.hosts + chosen.spares)
    return expect(chosen, range(40)).effective * share


def test_a_job_that_breaks_faster_than_it_recovers_gets_nowhere() -> None:
    chosen = setting(hazards=(replace(CRASH, per_s=1 / 10),), horizon_s=7200.0)
    assert closed.effective(chosen) < 1e-6
    assert expect(chosen, range(2)).effective < 1e-3

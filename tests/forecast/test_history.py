import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.forecast import closed_form
from orchestrator.forecast.history import Account, history
from orchestrator.forecast.monte_carlo import best_of, expect, forecast
from orchestrator.forecast.rates import DAY_S
from orchestrator.forecast.setting import Hazard, MemoryTier, Setting
from tests.forecast.settings import CRASH, published, setting


class Script(Random):
    """A random generator that returns times from a list, and then a time that is never reached."""

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
"""Saves start at 100 s, 210 s, 320 s …, and each is complete 50 s later."""


@pytest.mark.parametrize(
    ("at", "lost", "stalled"),
    [
        (90.0, 90.0, 0.0),
        (149.0, 139.0, 10.0),  # the first save has started but is not complete
        (151.0, 41.0, 10.0),
        (215.0, 100.0, 15.0),  # in the stall of the second, with the first one complete
        (300.0, 80.0, 20.0),
    ],
)
def test_a_failure_costs_the_work_since_the_last_complete_save(
    at: float, lost: float, stalled: float
) -> None:
    seconds = course(replace(ONE, horizon_s=at + 182.0), at).seconds
    assert seconds["lost work"] == pytest.approx(lost)
    assert seconds["checkpoint stalls"] == pytest.approx(stalled)
    assert (seconds["detection"], seconds["restart"]) == (2.0, 180.0)
    assert sum(seconds.values()) == pytest.approx(at + 182.0)


def test_a_failure_during_recovery_restarts_the_recovery() -> None:
    # Failures at 90 s and 100 s later, during the restart, and no other.
    account = course(replace(ONE, horizon_s=90.0 + 100.0 + 182.0), 90.0, 100.0)
    assert account.failures == 2
    assert account.seconds["restart"] == pytest.approx(98.0 + 180.0)
    assert account.seconds["detection"] == pytest.approx(4.0)


def test_a_planned_failure_costs_a_save_and_a_restart_but_no_work() -> None:
    planned = Hazard(name="planned", per_s=1.0, detection_s=0.0, takes_host=False, planned=True)
    account = course(replace(ONE, hazards=(planned,), horizon_s=1000.0), 90.0)
    assert account.failures == 0
    assert account.seconds["lost work"] == 0.0
    assert account.seconds["restart"] == 180.0
    assert account.seconds["queue"] == 0.0


def test_without_a_spare_the_job_waits_for_the_first_available_host() -> None:
    chosen = replace(ONE, hazards=(CRASH,), spares=0, reserve=1, horizon_s=5000.0)
    # One failure at 90 s. The repair takes 1,000 s. The scheduler grants another host after 300 s.
    waited = course(chosen, 90.0, 1e12, 1000.0, 300.0).seconds["queue"]
    assert waited == pytest.approx(298.0)  # of which 2 s were needed to notice
    waited = course(replace(chosen, reserve=0), 90.0, 1e12, 1000.0, 300.0).seconds["queue"]
    assert waited == pytest.approx(998.0)
    spared = course(replace(chosen, spares=1), 90.0, 1e12, 1000.0, 300.0)
    assert (spared.seconds["queue"], spared.waits) == (0.0, 0)


def test_a_repaired_host_of_the_reserve_replaces_a_missing_one() -> None:
    chosen = replace(ONE, hazards=(CRASH,), spares=0, reserve=1, horizon_s=5000.0)
    # Failure at 90 s: granted after 300 s, repaired after 1,000 s, so the reserve is full at 1,090
    # s. Failure at 800 s: repaired after 9,000 s, granted 200 s after the reserve has a host again.
    account = course(chosen, 90.0, 710.0, 1000.0, 300.0, 1e12, 9000.0, 200.0)
    assert account.waits == 2
    assert account.seconds["queue"] == pytest.approx(298.0 + 1090 + 200 - 800 - 2)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    mtbf=st.floats(300, 1e6),
    interval=st.floats(1, 1e5),
    write=st.floats(0.1, 1e4),
    spares=st.integers(0, 5),
    reserve=st.integers(0, 5),
)
def test_every_second_has_a_category_and_a_seed_gives_one_history(
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


IN_REPAIR = CRASH.per_s * DAY_S
"""Hosts in repair on average, 8.64, in the default `setting`."""


@pytest.mark.parametrize(
    ("spares", "reserve"), [(0, 0), (8, 0), (0, 8), (2, 7), (5, 4), (1, 11), (12, 1)]
)
@pytest.mark.parametrize(("queue", "apart"), [(600.0, 0.01), (4 * 3600.0, 0.03)])
def test_they_agree_if_the_reserve_is_close_to_the_hosts_in_repair(
    spares: int, reserve: int, queue: float, apart: float
) -> None:
    chosen = setting(spares=spares, reserve=reserve, queue_s=queue, horizon_s=400 * DAY_S)
    found = expect(chosen, range(20))
    assert found.effective == pytest.approx(found.closed, abs=apart)


def test_time_without_enough_hosts_is_exact_for_no_or_an_ample_reserve() -> None:
    bare = setting(spares=10, reserve=0)
    assert closed_form.short(bare) == pytest.approx(1 - poisson_up_to(10, IN_REPAIR))
    assert closed_form.bare(setting(spares=3, reserve=7)) == closed_form.short(bare)
    ample = setting(spares=1, reserve=1000, queue_s=3600.0)
    assert closed_form.short(ample) == pytest.approx(1 - poisson_up_to(1, IN_REPAIR / 25))
    assert closed_form.short(setting(hazards=(replace(CRASH, takes_host=False),))) == 0


def poisson_up_to(most: int, mean: float) -> float:
    return sum(math.exp(-mean) * mean**count / math.factorial(count) for count in range(most + 1))


def test_simulation_and_closed_form_agree_for_published_classes() -> None:
    found = expect(published(2048, "llama3", horizon_s=54 * DAY_S), range(10))
    assert found.effective == pytest.approx(found.closed, abs=0.005)


def test_the_best_interval_also_wins_in_simulated_histories() -> None:
    found = forecast(setting(), histories=10, seed=3, step_s=5.0)
    best = max(found.around, key=lambda one: one.effective)
    assert best.setting.interval_s == pytest.approx(found.best.setting.interval_s, rel=1.01)
    assert found.best.effective > found.expected.effective
    assert found.best.setting.interval_s % 5.0 == 0
    assert forecast(setting(), histories=10, seed=3, step_s=5.0) == found


def test_spares_pay_off_with_a_long_queue_and_not_with_a_short_one() -> None:
    slow, fast = setting(queue_s=6 * 3600.0), setting(queue_s=1.0)
    assert best_of(slow, 1.0).spares > best_of(fast, 1.0).spares == 0
    held = best_of(slow, 1.0)
    for spares in (0, held.spares + 3):
        other = replace(held, spares=spares, reserve=held.reserve + held.spares - spares)
        assert worth(other) < worth(held)


def worth(chosen: Setting) -> float:
    return expect(chosen, range(40)).worth


@pytest.mark.parametrize("beside", [1, 6, 9, 12])
@pytest.mark.parametrize("queue", [600.0, 6 * 3600.0])
def test_the_recommended_spares_are_best_with_a_finite_inventory_too(
    beside: int, queue: float
) -> None:
    chosen = best_of(
        setting(hosts=2000, spares=0, reserve=beside, queue_s=queue, horizon_s=90 * DAY_S), 1.0
    )
    each = [replace(chosen, spares=one, reserve=beside - one) for one in range(beside + 1)]
    worths = {one: expect(one, range(12)).worth for one in each}
    assert worths[chosen] == pytest.approx(max(worths.values()), abs=0.003)


@pytest.mark.parametrize(
    "chosen",
    [
        setting(hosts=2000, spares=8, reserve=0, horizon_s=90 * DAY_S),
        setting(hosts=2000, spares=8, reserve=2, queue_s=DAY_S, horizon_s=90 * DAY_S),
        # the closed form's long run is far away
        setting(hosts=20, spares=3, reserve=17, repair_s=90 * DAY_S, horizon_s=DAY_S),
    ],
)
def test_the_best_setting_is_never_worse_than_the_specs(
    chosen: Setting,
) -> None:
    found = forecast(chosen, histories=8, seed=0, step_s=5.0)
    assert found.best in found.around
    assert found.best.worth >= found.expected.worth


def test_an_interval_is_not_best_just_because_few_histories_had_failures() -> None:
    rarely = replace(CRASH, per_s=1 / (100 * DAY_S))
    found = forecast(setting(hazards=(rarely,), horizon_s=DAY_S), 2, seed=0, step_s=5.0)
    assert found.expected.failures == 0
    assert found.around[-1].worth > found.best.worth
    assert found.best.setting.interval_s == best_of(found.expected.setting, 5.0).interval_s


def test_all_compared_settings_have_the_same_failures() -> None:
    found = forecast(setting(), histories=10, seed=3, step_s=5.0)
    assert {one.failures for one in found.around} == {found.expected.failures}


def test_a_job_that_fails_faster_than_it_recovers_makes_no_progress() -> None:
    chosen = setting(hazards=(replace(CRASH, per_s=1 / 10),), horizon_s=7200.0)
    assert closed_form.effective(chosen) < 1e-6
    assert expect(chosen, range(2)).effective < 1e-3


MEMORY = MemoryTier(interval_s=10.0, stall_s=0.0, lag_s=3.0, restart_s=60.0)
COVERED = replace(CRASH, takes_host=False, covered=True)
TWO_TIERS = replace(ONE, hazards=(COVERED,), stall_s=0.0, memory=MEMORY)
"""Copies at 10 s, 20 s, … are safe 3 s later. Saves to the disk at 100 s, 200 s, …"""


def test_a_covered_failure_costs_the_work_since_the_last_copy_that_was_safe() -> None:
    for at, lost in ((90.0, 10.0), (92.0, 12.0), (94.0, 4.0), (12.0, 12.0)):
        seconds = course(replace(TWO_TIERS, horizon_s=at + 62.0), at).seconds
        assert seconds["lost work"] == pytest.approx(lost), at
        assert (seconds["detection"], seconds["restart"]) == (2.0, 60.0)
        assert sum(seconds.values()) == pytest.approx(at + 62.0)


def test_what_only_memory_has_is_lost_with_it() -> None:
    """A covered failure at 195 s keeps the steps up to 190 s. The next one takes the memory at 40 s
    of training later, after the save that began at 200 s and was complete at 250 s has not begun
    again: only the first 100 s are on the disk."""
    read = replace(COVERED, covered=False)
    for after_s, lost in ((40.0, 5.0 + 130.0), (65.0, 5.0 + 55.0)):
        end = 195.0 + 62.0 + after_s + 182.0
        chosen = replace(TWO_TIERS, hazards=(COVERED, read), horizon_s=end)
        account = drawn(chosen, [195.0, 62.0 + after_s], [0.0, 1.0])
        assert account.seconds["lost work"] == pytest.approx(lost), after_s
        assert account.seconds["restart"] == pytest.approx(60.0 + 180.0)


def test_a_failure_that_takes_the_memory_during_a_recovery_loses_what_only_memory_had() -> None:
    read = replace(COVERED, covered=False)
    end = 195.0 + 30.0 + 182.0
    account = drawn(replace(TWO_TIERS, hazards=(COVERED, read), horizon_s=end), [195, 30], [0, 1])
    assert account.seconds["lost work"] == pytest.approx(95.0)
    assert account.seconds["training"] == pytest.approx(100.0)


class Drawn(Script):
    """A script that also says which hazard strikes."""

    kinds: list[float]

    def random(self) -> float:
        return self.kinds.pop(0)


def drawn(chosen: Setting, times: list[float], kinds: list[float]) -> Account:
    from orchestrator.forecast.history import _History

    script = Drawn(*times)
    script.kinds = kinds
    return _History(chosen, script).run()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    mtbf=st.floats(300, 1e6),
    disk=st.floats(1, 1e5),
    copy=st.floats(1, 1e4),
    write=st.floats(0.1, 1e4),
    lag=st.floats(0, 1e3),
)
def test_every_second_has_a_category_with_two_tiers_too(
    seed: int, mtbf: float, disk: float, copy: float, write: float, lag: float
) -> None:
    memory = MemoryTier(interval_s=copy, stall_s=0.01 * copy, lag_s=lag, restart_s=60.0)
    chosen = setting(
        hazards=(replace(COVERED, per_s=0.9 / mtbf), replace(CRASH, per_s=0.1 / mtbf)),
        horizon_s=DAY_S,
        interval_s=disk,
        stall_s=write / 3,
        write_s=write,
        memory=memory,
    )
    account = history(chosen, seed)
    assert sum(account.seconds.values()) == pytest.approx(chosen.horizon_s)
    assert all(value >= -1e-6 for value in account.seconds.values())


@pytest.mark.parametrize("disk", [600.0, 3000.0])
@pytest.mark.parametrize("uncovered", [0.05, 0.5])
def test_histories_and_closed_form_agree_with_two_tiers(disk: float, uncovered: float) -> None:
    hazards = (
        replace(CRASH, per_s=(1 - uncovered) * CRASH.per_s, covered=True),
        replace(CRASH, per_s=uncovered * CRASH.per_s),
    )
    memory = MemoryTier(interval_s=20.0, stall_s=0.1, lag_s=5.0, restart_s=120.0)
    chosen = setting(hazards=hazards, interval_s=disk, horizon_s=60 * DAY_S, memory=memory)
    found = expect(chosen, range(30))
    assert found.effective == pytest.approx(found.closed, abs=0.008)
    best = closed_form.best_interval_s(chosen)
    alone = closed_form.best_interval_s(replace(chosen, memory=None))
    assert best > alone * 0.9 / uncovered**0.5, "the rate of what memory does not cover decides"

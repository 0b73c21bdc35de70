"""Simulates one setting many times: the mean and the spread of its outcomes."""

from collections.abc import Sequence
from statistics import fmean, quantiles

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.forecast import closed_form
from orchestrator.forecast.history import history
from orchestrator.forecast.setting import PARTS, Setting

AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the best interval that are simulated too."""


class Expected(Struct, frozen=True, kw_only=True):
    """The simulated outcome of one setting."""

    setting: Setting
    effective: float
    """Mean share of time in which the job trains and keeps the result."""
    low: float
    high: float
    """90 % of the simulations are between `low` and `high`."""
    closed: float
    """Value of the closed form."""
    parts: dict[str, float]
    """Mean share of each of PARTS; they add up to 1."""
    failures: float
    """Mean number of unplanned failures."""
    fewest: int
    most: int
    waits: float
    """Mean number of failures with no spare available."""

    @property
    def worth(self) -> float:
        """Kept work per host that the job holds, spares included."""
        setting = self.setting
        return self.effective * setting.hosts / (setting.hosts + setting.spares)


class Forecast(Struct, frozen=True, kw_only=True):
    expected: Expected
    """With the spec's own interval and spares."""
    best: Expected
    """With the best interval and spares; never worth less than `expected`."""
    around: tuple[Expected, ...]
    """The best interval and others near it, with the best number of spares. All use the same seeds,
    and so the same failures."""
    histories: int
    seed: int


def forecast(setting: Setting, histories: int, seed: int, step_s: float) -> Forecast:
    """The forecast for `setting`, which has the spec's interval. The best interval is a whole
    number of steps.

    The closed form proposes the best setting, and the simulated histories must confirm it: a
    setting that they find worse than the spec's is never recommended. Other intervals are only
    shown. The histories do not choose among them, because for a job that rarely fails they would
    choose the longest.
    """
    played: dict[Setting, Expected] = {}

    def play(one: Setting) -> Expected:
        if one not in played:
            played[one] = expect(one, range(seed, seed + histories))
        return played[one]

    advised = best_of(setting, step_s)
    kept = replace(advised, spares=setting.spares, reserve=setting.reserve)
    expected = play(setting)
    best = max(play(advised), play(kept), expected, key=lambda one: one.worth)
    own_s = best.setting.interval_s
    intervals = {own_s, *(whole_steps(factor * own_s, step_s) for factor in AROUND)}
    around = [play(replace(best.setting, interval_s=one)) for one in sorted(intervals)]
    return Forecast(
        expected=expected,
        best=best,
        around=tuple(around),
        histories=histories,
        seed=seed,
    )


def best_of(setting: Setting, step_s: float) -> Setting:
    """`setting` with the best interval, in whole steps, and the best number of spares for it."""
    there = setting.spares + setting.reserve
    saved = whole_steps(closed_form.best_interval_s(setting), step_s)
    spares = closed_form.best_spares(replace(setting, interval_s=saved))
    return replace(setting, interval_s=saved, spares=spares, reserve=there - spares)


def whole_steps(seconds: float, step_s: float) -> float:
    return max(1, round(seconds / step_s)) * step_s


def expect(setting: Setting, seeds: Sequence[int]) -> Expected:
    """Requires at least two seeds."""
    accounts = [history(setting, seed) for seed in seeds]
    shares = [account.seconds["training"] / setting.horizon_s for account in accounts]
    cuts = quantiles(shares, n=20, method="inclusive")
    failures = [account.failures for account in accounts]
    return Expected(
        setting=setting,
        effective=fmean(shares),
        low=cuts[0],
        high=cuts[-1],
        closed=closed_form.effective(setting),
        parts={
            part: fmean(account.seconds[part] for account in accounts) / setting.horizon_s
            for part in PARTS
        },
        failures=fmean(failures),
        fewest=min(failures),
        most=max(failures),
        waits=fmean(account.waits for account in accounts),
    )

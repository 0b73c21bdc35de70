"""Many histories of one setting: what to expect, and how far apart luck and bad luck are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, quantiles

from orchestrator.forecast import closed
from orchestrator.forecast.history import history
from orchestrator.forecast.setting import PARTS, Setting

AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Shares of the best interval that are tried as well."""
LEAST = 8
"""Histories of what is only looked at beside the forecast; the forecast has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Of one setting."""

    setting: Setting
    effective: float
    """Mean share of the time in which the job does work that is kept."""
    low: float
    high: float
    """Between them are nine of ten histories."""
    closed: float
    """The mean by the closed form."""
    parts: dict[str, float]
    """Mean share of each of PARTS; together 1."""
    failures: float
    """Mean number of those that nobody planned."""
    fewest: int
    most: int
    waits: float
    """Mean number of times that no spare was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    expected: Expected
    """With the spec's own interval and spares."""
    best: Expected
    """With the best ones."""
    around: tuple[Expected, ...]
    """The best interval and others around it, with the best number of spares."""
    histories: int
    seed: int


def forecast(setting: Setting, histories: int, seed: int, step_s: float) -> Forecast:
    """`interval_s` of `setting` is the spec's; the best one is a whole number of steps."""
    seeds = range(seed, seed + histories)
    few = seeds[: max(LEAST, histories // 5)]
    advised = best_of(setting, step_s)
    intervals = sorted(
        {whole_steps(factor * advised.interval_s, step_s) for factor in AROUND}
        - {advised.interval_s}
    )
    best = expect(advised, seeds)
    others = [expect(replace(advised, interval_s=one), few) for one in intervals]
    return Forecast(
        expected=best if setting == advised else expect(setting, seeds),
        best=best,
        around=tuple(sorted([*others, best], key=lambda one: one.setting.interval_s)),
        histories=histories,
        seed=seed,
    )


def best_of(setting: Setting, step_s: float) -> Setting:
    """`setting` with the best interval, in whole steps, and the best number of spares with that."""
    there = setting.spares + setting.reserve
    saved = whole_steps(closed.best_interval_s(setting), step_s)
    spares = closed.best_spares(replace(setting, interval_s=saved))
    return replace(setting, interval_s=saved, spares=spares, reserve=there - spares)


def whole_steps(seconds: float, step_s: float) -> float:
    return max(1, round(seconds / step_s)) * step_s


def expect(setting: Setting, seeds: Sequence[int]) -> Expected:
    """Two seeds at least."""
    accounts = [history(setting, seed) for seed in seeds]
    shares = [account.seconds["training"] / setting.horizon_s for account in accounts]
    cuts = quantiles(shares, n=20, method="inclusive")
    failures = [account.failures for account in accounts]
    return Expected(
        setting=setting,
        effective=fmean(shares),
        low=cuts[0],
        high=cuts[-1],
        closed=closed.effective(setting),
        parts={
            part: fmean(account.seconds[part] for account in accounts) / setting.horizon_s
            for part in PARTS
        },
        failures=fmean(failures),
        fewest=min(failures),
        most=max(failures),
        waits=fmean(account.waits for account in accounts),
    )

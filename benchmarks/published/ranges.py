"""The ranges that a plan shows, and how many published speeds of unseen sources are inside them.

A range is for runs of a source that the ranges did not see. So its width comes from sources that
were left out one after the other (conformal prediction with sources as folds), not from the
percentiles of the sources that it rests on: runs of one source share software and cluster, and a
new source is off by as much as known sources differ.

    center   mean logarithm of published / planned over the sources of a group, with one source more
             that meets the plan exactly, because two sources alone say little about a bias
    spread   root of the mean square distance to the center, each source with the same weight, with
             two sources more that are spread as all sources are
    range    center +- width x spread; `width` is the smallest for which 90 % of the runs of sources
             that were left out are inside. Runs whose axes no other source has are off by more, so
             the group of all runs has a width of its own, from such runs alone
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks.published.compared import Compared, mean
from orchestrator.inventory.calibration import ErrorRange

INSIDE = 0.9
"""Share of the published speeds of a new source that a range is meant to have."""
LEAST_RUNS, LEAST_SOURCES = 8, 2
"""A range rests on at least so many runs and sources; else on runs that have less in common."""
UNBIASED, TYPICAL = 1, 2
"""Sources that are added to those of a group, for its center and for its spread."""

Key = tuple[str, str, int]
LEVELS: Sequence[Callable[[Compared], Key]] = (
    lambda one: (one.architecture, one.axes, one.length),
    lambda one: (one.architecture, one.axes, 0),
    lambda one: ("any", one.axes, 0),
    lambda one: EVERYTHING,
)
"""What runs of a group have in common, the most first."""


EVERYTHING: Key = ("any", "any", 0)


class Widths(NamedTuple):
    like: float
    """For groups that have the axes of a plan."""
    alone: float
    """For the group of all runs, whose ranges are for axes that no two sources have."""

    def of(self, key: Key) -> float:
        return self.alone if key == EVERYTHING else self.like


class Group(NamedTuple):
    center: float
    spread: float
    runs: int
    sources: int


def groups_of(found: Sequence[Compared]) -> dict[Key, Group]:
    """All groups that are large enough, the most similar runs first."""
    result: dict[Key, Group] = {}
    everything = _squares(found, _center(found))
    for level in LEVELS:
        members: dict[Key, list[Compared]] = defaultdict(list)
        for one in found:
            members[level(one)].append(one)
        for key, group in sorted(members.items()):
            sources = len({one.source for one in group})
            small = len(group) < LEAST_RUNS or sources < LEAST_SOURCES
            if small and level is not LEVELS[-1]:
                continue
            center = _center(group)
            squares = (sources * _squares(group, center) + TYPICAL * everything) / (
                sources + TYPICAL
            )
            result[key] = Group(center, math.sqrt(squares), len(group), sources)
    return result


def _center(group: Iterable[Compared]) -> float:
    means = [mean([math.log(one.ratio) for one in own]) for own in _by_source(group).values()]
    return math.fsum(means) / (len(means) + UNBIASED)


def _squares(group: Iterable[Compared], center: float) -> float:
    return mean(
        [
            mean([(math.log(one.ratio) - center) ** 2 for one in own])
            for own in _by_source(group).values()
        ]
    )


def _by_source(group: Iterable[Compared]) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = defaultdict(list)
    for one in group:
        found[one.source].append(one)
    return found


def key_for(groups: dict[Key, Group], one: Compared) -> Key:
    return next(level(one) for level in LEVELS if level(one) in groups)


def widths_of(found: Sequence[Compared]) -> Widths:
    """Spreads by which ranges must reach out. Rows and sources both get the share `INSIDE`."""
    scores: dict[str, list[tuple[bool, float]]] = {}
    for name, own in _by_source(found).items():
        groups = groups_of([one for one in found if one.source != name])
        scores[name] = [_score(groups, one) for one in own]
    near = [[score for alone, score in own if not alone] for own in scores.values()]
    like = _width([own for own in near if own])
    far = [[score for alone, score in own if alone] for own in scores.values()]
    # Less is known of such runs, so few of them must not make their range narrower.
    return Widths(like, max(like, _width([own for own in far if own]) if any(far) else like))


def _score(groups: dict[Key, Group], one: Compared) -> tuple[bool, float]:
    """Whether no run with these axes is in a group, and spreads between the run and the center."""
    key = key_for(groups, one)
    group = groups[key]
    return key == EVERYTHING, abs(math.log(one.ratio) - group.center) / group.spread


def _width(scores: Sequence[Sequence[float]]) -> float:
    by_run = [(score, 1.0) for own in scores for score in own]
    by_source = [(score, 1 / len(own)) for own in scores for score in own]
    return max(_quantile(by_run), _quantile(by_source))


def _quantile(weighted: Iterable[tuple[float, float]]) -> float:
    ordered = sorted(weighted)
    total, passed = math.fsum(weight for _, weight in ordered), 0.0
    for score, weight in ordered:
        passed += weight
        if passed >= INSIDE * total * (1 - 1e-9):
            return score
    return ordered[-1][0]


def ranges_of(found: Sequence[Compared]) -> list[ErrorRange]:
    """The ranges of runs that have something in common, the most similar runs first."""
    widths = widths_of(found)
    return [
        ErrorRange(
            architecture=key[0],
            axes=key[1],
            tokens=key[2],
            low=round(math.exp(group.center - widths.of(key) * group.spread), 3),
            high=round(math.exp(group.center + widths.of(key) * group.spread), 3),
            runs=group.runs,
            sources=group.sources,
        )
        for key, group in groups_of(found).items()
    ]


def left_out(found: Sequence[Compared]) -> dict[str, list[bool]]:
    """For each source whether its published speeds are inside ranges, and widths, that only the
    other sources gave."""
    result = {}
    for name, own in _by_source(found).items():
        others = [one for one in found if one.source != name]
        groups, widths = groups_of(others), widths_of(others)
        scores = [_score(groups, one) for one in own]
        result[name] = [
            score <= (widths.alone if alone else widths.like) for alone, score in scores
        ]
    return result


def ranges_text(found: Sequence[Compared]) -> str:
    lines = [
        "# Published speeds relative to planned ones: ranges that have 90 % of the runs of sources",
        "# that were left out. Written by `python -m benchmarks.planner_accuracy --write`;",
        "# benchmarks/published/ranges.py explains it.",
    ]
    for one in ranges_of(found):
        lines += [
            "",
            "[[range]]",
            f'architecture = "{one.architecture}"',
            f'axes = "{one.axes}"',
            f"tokens = {one.tokens}",
            f"low = {one.low}",
            f"high = {one.high}",
            f"runs = {one.runs}",
            f"sources = {one.sources}",
        ]
    return "\n".join(lines) + "\n"

"""The ranges that a plan shows, and how many published speeds of unseen sources are inside them.

A range is for runs of a source that the ranges did not see. So its width comes from sources that
were left out one after the other (conformal prediction with sources as folds), not from the
percentiles of the sources that it rests on: runs of one source share software and cluster, and a
new source is off by as much as known sources differ. A source of n runs has the weight sqrt(n):
one run says less about its software than a hundred, but a hundred are not independent.

    center   mean logarithm of published / planned over the sources of a group, with one run more
             that meets the plan exactly, because two sources alone say little about a bias
    spread   root of the mean square distance to the center, with two runs more that are spread as
             all sources are
    range    center +- width x spread x widening; `width` is the smallest for which 90 % of the runs
             of sources that were left out are inside
    widening sqrt(1 + FEW / (1 + support)): a device that few sources have may differ from others in
             ways that no source shows. `support` is the weight of its sources, and a tenth of that
             of other devices of its architecture
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import asdict

from benchmarks.published.compared import Compared, mean
from orchestrator.inventory.calibration import Comparable, ErrorRange
from orchestrator.plan.accuracy import Group

INSIDE = 0.9
"""Share of the published speeds of a new source that a range is meant to have."""
UNBIASED, TYPICAL = 1, 2
"""Weight that is added to the sources of a group, for its center and for its spread."""
ELSEWHERE, FEW = 0.1, 12
"""What a source counts for other devices of the same architecture, and the support beside which one
source more hardly matters. Chosen on 70 % of the rows: with FEW = 0 four of five runs on H200 are
inside their ranges, with 12 nine of ten."""


def weight(runs: int) -> float:
    """Of a source."""
    return math.sqrt(runs)


class Spread(NamedTuple):
    """Logarithms of published / planned in a group."""

    center: float
    spread: float
    runs: int
    sources: int


class Judged(NamedTuple):
    """A run in a range that its source did not give."""

    one: Compared
    is_inside: bool
    width: float
    """Logarithm of the highest speed of the range relative to the lowest."""


def spreads_of(found: Sequence[Compared]) -> dict[Group, Spread]:
    everything = _squares(found, _center(found))
    members: dict[Group, list[Compared]] = defaultdict(list)
    for one in found:
        members[one.group].append(one)
    return {group: _spread(own, everything) for group, own in sorted(members.items())}


class Support(NamedTuple):
    """Weights of sources."""

    profile: Mapping[str, float]
    architecture: Mapping[str, float]

    def widening(self, profile: str, architecture: str) -> float:
        own, alike = self.profile.get(profile, 0.0), self.architecture.get(architecture, 0.0)
        support = own + ELSEWHERE * max(0.0, alike - own)
        return math.sqrt(1 + FEW / (1 + support))


def support_of(found: Iterable[Compared]) -> Support:
    by_profile: dict[str, float] = defaultdict(float)
    by_architecture: dict[str, float] = defaultdict(float)
    for own in _by_source(found).values():
        for profile, runs in Counter(one.run.profile for one in own).items():
            by_profile[profile] += weight(runs)
        for architecture, runs in Counter(one.architecture for one in own).items():
            by_architecture[architecture] += weight(runs)
    return Support(by_profile, by_architecture)


def _spread(own: Sequence[Compared], everything: float) -> Spread:
    center, sources = _center(own), _by_source(own)
    weights = math.fsum(weight(len(runs)) for runs in sources.values())
    squares = weights * _squares(own, center) + TYPICAL * everything
    return Spread(center, math.sqrt(squares / (weights + TYPICAL)), len(own), len(sources))


def _center(group: Iterable[Compared]) -> float:
    sources = _by_source(group).values()
    means = [(weight(len(own)), mean([math.log(one.ratio) for one in own])) for own in sources]
    total = math.fsum(each for each, _ in means) + UNBIASED
    return math.fsum(each * value for each, value in means) / total


def _squares(group: Iterable[Compared], center: float) -> float:
    sources = _by_source(group).values()
    squares = [
        (weight(len(own)), mean([(math.log(one.ratio) - center) ** 2 for one in own]))
        for own in sources
    ]
    total = math.fsum(each for each, _ in squares)
    return math.fsum(each * value for each, value in squares) / total


def _by_source(group: Iterable[Compared]) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = defaultdict(list)
    for one in group:
        found[one.source].append(one)
    return found


def width_of(found: Sequence[Compared]) -> float:
    """Spreads by which ranges must reach out."""
    scores: list[tuple[float, float]] = []
    for name, own in _by_source(found).items():
        reach = _reach_of([one for one in found if one.source != name])
        scores += [(reach.needed(one), weight(len(own)) / len(own)) for one in own]
    return _quantile(scores)


class _Reach(NamedTuple):
    """How far ranges reach for a run that they do not rest on, in units of `width`."""

    spreads: Mapping[Group, Spread]
    support: Support

    def of(self, one: Compared) -> float:
        widening = self.support.widening(one.run.profile, one.architecture)
        return self.spreads[one.group].spread * widening

    def needed(self, one: Compared) -> float:
        """The width with which the run is just inside."""
        return abs(math.log(one.ratio) - self.spreads[one.group].center) / self.of(one)


def _reach_of(found: Sequence[Compared]) -> _Reach:
    return _Reach(spreads_of(found), support_of(found))


def _quantile(weighted: Iterable[tuple[float, float]]) -> float:
    ordered = sorted(weighted)
    total, passed = math.fsum(each for _, each in ordered), 0.0
    for value, each in ordered:
        passed += each
        if passed >= INSIDE * total * (1 - 1e-9):
            return value
    return ordered[-1][0]


def ranges_of(found: Sequence[Compared]) -> list[ErrorRange]:
    width = width_of(found)
    return [
        ErrorRange(
            group=group,
            center=round(math.exp(one.center), 3),
            reach=round(width * one.spread, 4),
            runs=one.runs,
            sources=one.sources,
        )
        for group, one in spreads_of(found).items()
    ]


def comparable_of(found: Iterable[Compared]) -> list[Comparable]:
    counts = Counter((one.group, one.architecture, one.axes, one.length) for one in found)
    return [
        Comparable(group=group, architecture=architecture, axes=axes, tokens=tokens, runs=runs)
        for (group, architecture, axes, tokens), runs in sorted(counts.items())
    ]


def left_out(found: Sequence[Compared]) -> dict[str, list[Judged]]:
    """The runs of each source in ranges that only the other sources gave."""
    result = {}
    for name, own in _by_source(found).items():
        others = [one for one in found if one.source != name]
        reach, width = _reach_of(others), width_of(others)
        result[name] = [
            Judged(one, reach.needed(one) <= width, 2 * width * reach.of(one)) for one in own
        ]
    return result


def ranges_text(found: Sequence[Compared], with_adapters: Iterable[Compared]) -> str:
    lines = [
        "# Published speeds relative to planned ones: ranges that have 90 % of the runs of sources",
        "# that were left out, and how many runs are like a plan. Written by",
        "# `python -m benchmarks.planner_accuracy --write`; see benchmarks/published/ranges.py.",
    ]
    for one in ranges_of(found):
        lines += ["", *_table("range", asdict(one))]
    adapters = Counter(one.architecture for one in with_adapters)
    lines += ["", "[adapters]"]
    lines += [f"{name} = {runs}" for name, runs in sorted(adapters.items())]
    support = support_of(found)
    known = {one.run.profile: one.architecture for one in found}
    lines += ["", "[widening]", f"unknown = {support.widening('', ''):.3f}"]
    lines += ["", "[widening.architecture]"]
    lines += [f"{name} = {support.widening('', name):.3f}" for name in sorted(support.architecture)]
    lines += ["", "[widening.profile]"]
    lines += [f"{name} = {support.widening(name, known[name]):.3f}" for name in sorted(known)]
    for alike in comparable_of(found):
        lines += ["", *_table("comparable", asdict(alike))]
    return "\n".join(lines) + "\n"


def _table(name: str, values: Mapping[str, str | float]) -> list[str]:
    shown = (
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
        for key, value in values.items()
    )
    return [f"[[{name}]]", *shown]

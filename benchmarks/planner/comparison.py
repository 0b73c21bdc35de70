"""How well the planner compares two meshes, from pairs of published runs.

    python -m benchmarks.planner.comparison [--write]

A pair is two runs of one source with the same model, sequence, devices and hosts, but other meshes.
Errors that both plans share, as a device that is slower than its profile, cancel out in the ratio
of their speeds. So this error, not that of a single speed, says whether one mesh is faster.
`--write` writes its median (`orchestrator/inventory/calibration/comparison.toml`): of two plans
that differ by less, `ndctl plan` chooses the simpler one.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from benchmarks.published.compared import Compared, compare
from benchmarks.published.runs import runs
from orchestrator.inventory.profiles import CALIBRATIONS

FILE = CALIBRATIONS / "comparison.toml"
CLASSES = (0.0, 0.02, 0.05, 0.075, 0.1, 0.15, 0.3, math.inf)
"""Limits of the planned differences for which the table has rows."""


class Pair(NamedTuple):
    one: Compared
    other: Compared

    @property
    def planned(self) -> float:
        """Log of the ratio of the planned speeds."""
        return math.log(self.one.planned / self.other.planned)

    @property
    def published(self) -> float:
        """The same for the published speeds."""
        one, other = self.one.run, self.other.run
        return math.log(one.tokens_per_second_per_device / other.tokens_per_second_per_device)

    @property
    def error(self) -> float:
        """Of the ratio, as a share."""
        return math.expm1(abs(self.planned - self.published))

    @property
    def difference(self) -> float:
        """Share by which one plan is faster than the other."""
        return math.expm1(abs(self.planned))

    @property
    def gain(self) -> float:
        """Share by which the run that was planned faster is faster; negative if it is slower."""
        return math.expm1(self.published if self.planned > 0 else -self.published)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = pairs(compare(runs()))
    if args.write:
        FILE.write_text(text_of(found))
    print(report(found))


def pairs(found: Iterable[Compared]) -> list[Pair]:
    groups: dict[tuple[object, ...], list[Compared]] = defaultdict(list)
    for one in found:
        run, setup = one.run, one.run.setup
        hosts = (run.profile, run.fabric.hosts, run.fabric.devices_per_host)
        groups[run.source.name, run.model, setup.tokens, *hosts].append(one)
    return [
        Pair(one, other)
        for group in groups.values()
        for one, other in combinations(group, 2)
        if one.run.setup.mesh != other.run.setup.mesh
    ]


def text_of(found: Sequence[Pair]) -> str:
    return "\n".join(
        [
            "# Errors of the ratio of two planned speeds. Written by",
            "# `python -m benchmarks.planner.comparison --write`, which explains them.",
            "",
            f"typical = {round(typical(found), 3)}",
            f"pairs = {len(found)}",
            f"sources = {len({one.one.run.source.name for one in found})}",
            "",
        ]
    )


def typical(found: Sequence[Pair]) -> float:
    return sorted(pair.error for pair in found)[len(found) // 2]


def report(found: Sequence[Pair]) -> str:
    return "\n".join([*_by_source(found), "", *_by_difference(found)])


def _by_source(found: Sequence[Pair]) -> Iterator[str]:
    yield "| source | pairs | median error of the ratio |"
    yield "|---|---|---|"
    for name in dict.fromkeys(pair.one.run.source.name for pair in found):
        own = [pair for pair in found if pair.one.run.source.name == name]
        yield f"| {name} | {len(own)} | {typical(own):.1%} |"
    yield f"| all | {len(found)} | {typical(found):.1%} |"


def _by_difference(found: Sequence[Pair]) -> Iterator[str]:
    yield "| planned difference | pairs | the faster one was planned faster | mean gain |"
    yield "|---|---|---|---|"
    for low, high in pairwise(CLASSES):
        some = [pair for pair in found if low <= pair.difference < high]
        if some:
            right = sum(pair.gain > 0 for pair in some) / len(some)
            gain = sum(pair.gain for pair in some) / len(some)
            upper = "" if high == math.inf else f" to {high:.1%}"
            yield f"| {low:.1%}{upper} | {len(some)} | {right:.0%} | {gain:+.1%} |"


if __name__ == "__main__":
    main()

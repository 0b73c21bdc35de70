"""How well the planner predicts a source of runs if its constants are fitted to all other sources.

    python -m benchmarks.planner.cross_validation

For each source of `benchmarks/published`, `steady` and `memory` of its devices are fitted to
the other sources with the same architecture, each with the same weight, and then the source is
predicted. A source that has its architecture for itself is predicted with kernel speeds alone.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from benchmarks.published.compared import mean
from benchmarks.published.runs import Run, runs
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.cost.step import step_time

STEADY = (0.88, 0.94, 1.0, 1.06, 1.12)
MEMORY = (0.85, 1.0, 1.15)
"""Values that are tried, relative to the present ones."""


def main() -> None:
    print("| left out | runs | steady | memory | mean error | bias | worst |")
    print("|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(run.source.name for run in runs()):
        for architecture in sorted({_architecture(run) for run in runs() if _is_of(run, name)}):
            print(left_out(name, architecture))


def left_out(name: str, architecture: str) -> str:
    same = [run for run in runs() if _architecture(run) == architecture]
    own = [run for run in same if _is_of(run, name)]
    others = [run for run in same if not _is_of(run, name)]
    best = min(itertools.product(STEADY, MEMORY), key=lambda factors: _loss(others, factors))
    if not others:
        best = (1.0, 1.0)
    errors = list(_errors(own, best))
    return (
        f"| {name}, {architecture} | {len(own)} | x {best[0]:g} | x {best[1]:g}"
        f" | {mean([abs(error) for error in errors]):.1%} | {mean(errors):+.1%}"
        f" | {max(errors, key=abs):+.1%} |"
    )


def _is_of(run: Run, name: str) -> bool:
    return run.source.name == name


def _architecture(run: Run) -> str:
    return run.fabric.profile.calibration.architecture


def _loss(some: Sequence[Run], factors: tuple[float, float]) -> float:
    """The mean over sources of the mean size of the logarithmic error."""
    names = {run.source.name for run in some}
    return mean(
        [
            mean([abs(math.log1p(e)) for e in _errors([r for r in some if _is_of(r, n)], factors)])
            for n in names
        ]
        or [0.0]
    )


def _errors(some: Iterable[Run], factors: tuple[float, float]) -> Iterator[float]:
    fabrics: dict[int, Fabric] = {}
    for run in some:
        key = id(run.fabric)
        if key not in fabrics:
            fabrics[key] = _changed(run.fabric, factors)
        planned = step_time(run.setup, fabrics[key]).tokens_per_second_per_device
        yield planned / run.tokens_per_second_per_device - 1


def _changed(fabric: Fabric, factors: tuple[float, float]) -> Fabric:
    known = fabric.profile.calibration
    steady, memory = min(1.0, known.steady * factors[0]), min(1.0, known.memory * factors[1])
    calibration = replace(known, steady=steady, memory=memory)
    return replace(fabric, profile=replace(fabric.profile, calibration=calibration))


if __name__ == "__main__":
    main()

"""The planner's speed and memory against published training runs.

    python -m benchmarks.planner_accuracy [--summary] [--write]

Each run of `benchmarks/published` is planned with its mesh, batch, recomputation, number formats
and attention kernel as published. Errors are planned / published - 1, so a positive error is a plan
that promises too much. The exit status is 1 above one of `LIMITS`. `--summary` leaves out the table
of all runs. `--write` writes the ranges that `ndctl plan` shows
(`orchestrator/inventory/calibration/ranges.toml`).
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.published.runs import Run, runs
from orchestrator.inventory.calibration import ErrorRange
from orchestrator.inventory.profiles import CALIBRATIONS
from orchestrator.plan.accuracy import LENGTHS, axes_of, length_of
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.memory.peak_memory import memory_of

LEAST_RUNS, LEAST_SOURCES = 8, 2
"""A range rests on at least so many runs and sources; else on runs that have less in common."""
LIMITS: Mapping[str, Mapping[str, float]] = {
    "calibration": {"mean": 4, "median": 3},
    "checked": {"mean": 7, "median": 6},
    "held out": {"mean": 20, "median": 16},
    "all": {"mean": 7, "median": 5},
}
"""Largest errors in per cent, by use of the source."""
LEAST_INSIDE = 70
"""Per cent of the published speeds that must be inside the ranges which the other sources give."""


class Compared(NamedTuple):
    run: Run
    planned: float
    """Tokens per second and device."""
    memory_bytes: int | None
    """Planned, as torch's allocator counts; None: nothing is published."""

    @property
    def error(self) -> float:
        return self.planned / self.run.tokens_per_second_per_device - 1

    @property
    def ratio(self) -> float:
        """Published relative to planned."""
        return self.run.tokens_per_second_per_device / self.planned

    @property
    def architecture(self) -> str:
        return self.run.fabric.profile.calibration.architecture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = compare(runs())
    if args.write:
        (CALIBRATIONS / "ranges.toml").write_text(ranges_text(found))
    print(report(found, rows=not args.summary))
    broken = list(broken_limits(found))
    for line in broken:
        print(f"above its limit: {line}")
    sys.exit(1 if broken else 0)


def compare(some: Iterable[Run]) -> list[Compared]:
    return [
        Compared(
            run=run,
            planned=step_time(run.setup, run.fabric).tokens_per_second_per_device,
            memory_bytes=_allocated(run) if run.memory_bytes else None,
        )
        for run in some
    ]


def _allocated(run: Run) -> int:
    memory = memory_of(run.setup, run.fabric)
    return memory.tensor_bytes


def report(found: Sequence[Compared], *, rows: bool) -> str:
    tables = [
        ("use of the source", lambda one: one.run.source.use),
        ("source", lambda one: one.run.source.name),
        ("device", lambda one: one.run.profile),
        ("sequence", _length),
        ("axes", lambda one: axes_of(one.run.setup.mesh) or "data parallelism only"),
        ("all", lambda one: "all"),
    ]
    lines = [*_rows(found), ""] if rows else []
    for title, key in tables:
        lines += [*_table(title, found, key), ""]
    lines += [*_memory(found), ""]
    lines += ["Each source predicted by the ranges of all others:", *_left_out(found)]
    return "\n".join(lines)


def _length(one: Compared) -> str:
    most = length_of(one.run.setup.tokens)
    return f"over {LENGTHS[-2]:,}" if most == LENGTHS[-1] else f"up to {most:,}"


def _rows(found: Iterable[Compared]) -> Iterator[str]:
    yield "| source | model | device | tokens | mesh | batch | recompute | published | planned | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for one in found:
        run, setup = one.run, one.run.setup
        batch = f"{setup.micro_batch_size} x {setup.micro_batches}"
        yield (
            f"| {run.source.name} | {run.model} | {run.profile} | {setup.tokens} | {setup.mesh}"
            f" | {batch} | {setup.checkpointing} | {run.tokens_per_second_per_device:,.0f}"
            f" | {one.planned:,.0f} | {one.error:+.1%} |"
        )


def _table(title: str, found: Iterable[Compared], key: Callable[[Compared], str]) -> Iterator[str]:
    groups: dict[str, list[Compared]] = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    yield f"| {title} | runs | mean error | bias | worst |"
    yield "|---|---|---|---|---|"
    for name, group in groups.items():
        errors = [one.error for one in group]
        yield (
            f"| {name} | {len(group)} | {mean_error(group):.1%} | {mean(errors):+.1%}"
            f" | {max(errors, key=abs):+.1%} |"
        )


def _memory(found: Iterable[Compared]) -> Iterator[str]:
    groups: dict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.memory_bytes and one.run.memory_bytes:
            groups[one.run.source.name].append(one.memory_bytes / one.run.memory_bytes - 1)
    yield "| allocated memory of other trainers | runs | mean error | bias | worst |"
    yield "|---|---|---|---|---|"
    for name, errors in groups.items():
        size = mean([abs(error) for error in errors])
        worst = max(errors, key=abs)
        yield f"| {name} | {len(errors)} | {size:.1%} | {mean(errors):+.1%} | {worst:+.1%} |"


def _left_out(found: Sequence[Compared]) -> Iterator[str]:
    yield "| source | runs | inside the range |"
    yield "|---|---|---|"
    for name, inside in left_out(found).items():
        yield f"| {name} | {len(inside)} | {mean(inside):.0%} |"


def left_out(found: Sequence[Compared]) -> dict[str, list[bool]]:
    """For each source whether its published speeds are inside the ranges of the other sources."""
    result = {}
    for name in dict.fromkeys(one.run.source.name for one in found):
        others = ranges_of([one for one in found if one.run.source.name != name])
        own = [one for one in found if one.run.source.name == name]
        result[name] = [_is_inside(one, others) for one in own]
    return result


def _is_inside(one: Compared, ranges: Iterable[ErrorRange]) -> bool:
    axes, tokens = axes_of(one.run.setup.mesh), length_of(one.run.setup.tokens)
    for found in ranges:
        same = found.architecture in (one.architecture, "any") and found.axes in (axes, "any")
        if same and found.tokens in (tokens, 0):
            return found.low <= one.ratio <= found.high
    return False


def ranges_of(found: Sequence[Compared]) -> list[ErrorRange]:
    """The ranges of runs that have something in common, the most similar runs first."""
    levels: list[Callable[[Compared], tuple[str, str, int]]] = [
        lambda one: (one.architecture, _axes(one), length_of(one.run.setup.tokens)),
        lambda one: (one.architecture, _axes(one), 0),
        lambda one: ("any", _axes(one), 0),
        lambda one: ("any", "any", 0),
    ]
    result = []
    for level in levels:
        groups: dict[tuple[str, str, int], list[Compared]] = defaultdict(list)
        for one in found:
            groups[level(one)].append(one)
        for (architecture, axes, tokens), group in sorted(groups.items()):
            origins = {one.run.source.name for one in group}
            last = level is levels[-1]
            if not last and (len(group) < LEAST_RUNS or len(origins) < LEAST_SOURCES):
                continue
            low, high = (percentile(group, share) for share in (0.1, 0.9))
            result.append(
                ErrorRange(
                    architecture=architecture,
                    axes=axes,
                    tokens=tokens,
                    low=round(low, 3),
                    high=round(high, 3),
                    runs=len(group),
                    sources=len(origins),
                )
            )
    return result


def _axes(one: Compared) -> str:
    return axes_of(one.run.setup.mesh)


def percentile(group: Sequence[Compared], share: float) -> float:
    """Of `ratio`, where each source has the same weight: runs of one source are not independent."""
    count: dict[str, int] = defaultdict(int)
    for one in group:
        count[one.run.source.name] += 1
    ordered = sorted(group, key=lambda one: one.ratio)
    passed = 0.0
    for one in ordered:
        passed += 1 / count[one.run.source.name] / len(count)
        if passed >= share:
            return one.ratio
    return ordered[-1].ratio


def ranges_text(found: Sequence[Compared]) -> str:
    lines = [
        "# Published speeds relative to planned ones. Written by",
        "# `python -m benchmarks.planner_accuracy --write`, which explains the columns.",
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


def broken_limits(found: Sequence[Compared]) -> Iterator[str]:
    for use, limits in LIMITS.items():
        group = [one for one in found if use in ("all", one.run.source.use)]
        figures = {"mean": mean_error(group), "median": _median([abs(e.error) for e in group])}
        for name, limit in limits.items():
            if 100 * figures[name] > limit:
                yield f"{use}: {name} error {figures[name]:.1%}, limit {limit:g} %"
    inside = mean([one for source in left_out(found).values() for one in source])
    if 100 * inside < LEAST_INSIDE:
        yield f"inside the range: {inside:.0%}, limit {LEAST_INSIDE} %"


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def mean_error(group: Iterable[Compared]) -> float:
    return mean([abs(one.error) for one in group])


if __name__ == "__main__":
    main()

"""The planner's speed and memory against published training runs.

    python -m benchmarks.planner_accuracy [--summary] [--write]

Each run of `benchmarks/published` is planned with its mesh, batch, recomputation, number formats
and attention kernel as published. Errors are planned / published - 1, so a positive error is a plan
that promises too much. The exit status is 1 above one of `LIMITS`. `--summary` leaves out the table
of all runs. `--write` writes the ranges that `ndctl plan` shows, and how well each software is
planned (`ranges.toml` and `software.toml` in `orchestrator/inventory/calibration`).
"""

import argparse
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from benchmarks.published.compared import Compared, compare, mean, mean_error
from benchmarks.published.ranges import Judged, left_out, ranges_text
from benchmarks.published.runs import all_runs, runs, runs_with_adapters
from orchestrator.inventory.profiles import CALIBRATIONS
from orchestrator.plan.accuracy import LENGTHS

Key = Callable[[Compared], str]


def _use(one: Compared) -> str:
    return f"{one.run.source.use}{', other method' * one.run.other_method}"


def _source(one: Compared) -> str:
    return one.source


def _software(one: Compared) -> str:
    return one.run.source.software


def _device(one: Compared) -> str:
    return one.run.profile


def _length(one: Compared) -> str:
    return f"over {LENGTHS[-2]:,}" if one.length == LENGTHS[-1] else f"up to {one.length:,}"


TABLES: Mapping[str, Key] = {
    "use of the source": _use,
    "source": _source,
    "software": _software,
    "device": _device,
    "sequence": _length,
    "axes": lambda one: one.axes or "data parallelism only",
    "all": lambda one: "all",
}
LIMITS: Mapping[str, tuple[float, float]] = {
    "calibration": (5.3, 31),
    "checked": (5, 13),
    "held out": (10.7, 163),
    "held out, other method": (22.4, 67),
    "megatron": (8.2, 54),
    "megatron-tp-overlap": (4.8, 21),
    "h100-sxm-80gb": (8.7, 163),
    "h200-sxm-141gb": (9.2, 28),
    "b200-sxm-180gb": (5.5, 13),
    "gb200-186gb": (1, 2),
    "up to 32,768": (6, 30),
    "over 32,768": (11, 61),
    "tp": (9.9, 42),
    "tp pp": (9.5, 163),
    "tp cp": (7, 13),
    "cp": (13, 61),
    "pp": (10.2, 81),
    "tp cp pp": (3.2, 7),
    "all": (8.2, 163),
}
"""Largest mean and worst error in per cent, by group of one of `TABLES`."""
LEAST_INSIDE = 90
"""Per cent of the published speeds that must be inside the ranges which the other sources give."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found, beside = compare(runs()), compare(runs_with_adapters())
    if args.write:
        (CALIBRATIONS / "ranges.toml").write_text(ranges_text(found, beside))
        software = CALIBRATIONS / "software.toml"
        software.write_text(with_basis(software.read_text(), found))
    print(report(found, rows=not args.summary))
    replaced = compare(run for run in all_runs() if run.source.superseded_by)
    print("\n".join(["", *_table("superseded software", _groups(replaced, _source))]))
    print("\n".join(["", *_table("adapters, in no range", _groups(beside, _device))]))
    broken = list(broken_limits(found))
    for line in broken:
        print(f"above its limit: {line}")
    sys.exit(1 if broken else 0)


def report(found: Sequence[Compared], *, rows: bool) -> str:
    lines = [*_rows(found), ""] if rows else []
    for title, key in TABLES.items():
        lines += [*_table(title, _groups(found, key)), ""]
    lines += [*_memory(found), ""]
    lines += ["Each source in the ranges that the others give:", *_left_out(found)]
    return "\n".join(lines)


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


def _groups(found: Iterable[Compared], key: Key) -> dict[str, list[Compared]]:
    groups: dict[str, list[Compared]] = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    return groups


def _table(title: str, groups: Mapping[str, Sequence[Compared]]) -> Iterator[str]:
    yield f"| {title} | runs | mean error | bias | worst |"
    yield "|---|---|---|---|---|"
    for name, group in groups.items():
        bias = mean([one.error for one in group])
        yield (
            f"| {name} | {len(group)} | {mean_error(group):.1%} | {bias:+.1%}"
            f" | {_worst(group):+.1%} |"
        )


def _worst(group: Iterable[Compared]) -> float:
    return max((one.error for one in group), key=abs)


def with_basis(text: str, found: Iterable[Compared]) -> str:
    """The file `software.toml` with what each entry rests on."""
    for name, group in _groups(found, _software).items():
        errors = [one.error for one in group]
        basis = {
            "runs": len(group),
            "sources": len({one.source for one in group}),
            "mean_error": round(mean_error(group), 3),
            "bias": round(mean(errors), 3),
            "worst": round(_worst(group), 3),
        }
        head, rest = text.split(f"[{name}]\n", 1)
        for key, value in basis.items():
            rest = re.sub(rf"^{key} = .*$", f"{key} = {value}", rest, count=1, flags=re.MULTILINE)
        text = f"{head}[{name}]\n{rest}"
    return text


def _memory(found: Iterable[Compared]) -> Iterator[str]:
    groups: dict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.memory_bytes and one.run.memory_bytes:
            groups[one.source].append(one.memory_bytes / one.run.memory_bytes - 1)
    yield "| allocated memory of other trainers | runs | mean error | bias | worst |"
    yield "|---|---|---|---|---|"
    for name, errors in groups.items():
        size = mean([abs(error) for error in errors])
        worst = max(errors, key=abs)
        yield f"| {name} | {len(errors)} | {size:.1%} | {mean(errors):+.1%} | {worst:+.1%} |"


def _left_out(found: Sequence[Compared]) -> Iterator[str]:
    by_source = left_out(found)
    every = [one for own in by_source.values() for one in own]
    by_device: dict[str, list[Judged]] = defaultdict(list)
    for judged in every:
        by_device[judged.one.run.profile].append(judged)
    yield "| source or device | runs | inside the range | highest / lowest speed of it |"
    yield "|---|---|---|---|"
    for name, group in (*by_source.items(), *by_device.items(), ("all", every)):
        width = math.exp(mean([judged.width for judged in group]))
        yield f"| {name} | {len(group)} | {_inside(group):.0%} | {width:.2f} |"
    alike = mean([_inside(own) for own in by_source.values()])
    yield f"| all, each source alike | {len(every)} | {alike:.0%} | |"


def _inside(group: Sequence[Judged]) -> float:
    return mean([judged.is_inside for judged in group])


def broken_limits(found: Sequence[Compared]) -> Iterator[str]:
    for key in TABLES.values():
        for name, group in _groups(found, key).items():
            most, worst = LIMITS.get(name, (math.inf, math.inf))
            if 100 * mean_error(group) > most:
                yield f"{name}: mean error {mean_error(group):.1%}, limit {most:g} %"
            if 100 * abs(_worst(group)) > worst:
                yield f"{name}: worst error {_worst(group):+.1%}, limit {worst:g} %"
    inside = _inside([one for own in left_out(found).values() for one in own])
    if 100 * inside < LEAST_INSIDE:
        yield f"inside the range: {inside:.0%}, limit {LEAST_INSIDE} %"


if __name__ == "__main__":
    main()

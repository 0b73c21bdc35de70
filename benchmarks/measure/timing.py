"""What the benchmarks share: alternating measurements, medians and their spread, the machine."""

import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import accumulate


def machine() -> str:
    """The machine and the versions that a figure belongs to."""
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return f"{cores} cores of {platform.machine()}, Python {platform.python_version()}, {versions}"


def spread(values: Sequence[float], unit: str, digits: int = 1) -> str:
    """Median, and the lowest and highest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f}, n={len(values)})"


def middle(values: Sequence[float], digits: int) -> str:
    """The median and its 95 % interval."""
    low, high = interval(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what was sampled is with a probability of at least 95 %: the innermost
    pair of sorted values for which the binomial distribution says so, whatever the values'
    distribution. Fewer than six values cannot tell; then the lowest and the highest."""
    count, ordered = len(values), sorted(values)
    tails = accumulate(math.comb(count, k) / 2**count for k in range(count // 2))
    place = max((k for k, tail in enumerate(tails) if tail <= 0.025), default=0)
    return ordered[place], ordered[-1 - place]


def ratio(values: Mapping[str, Sequence[float]], ours: str, theirs: str) -> str:
    """Our values over theirs, pair by pair as they were measured in turn."""
    return spread(pairs(values, ours, theirs), "x", 3)


def pairs(values: Mapping[str, Sequence[float]], ours: str, theirs: str) -> list[float]:
    return [a / b for a, b in zip(values[ours], values[theirs], strict=True)]

"""What the benchmarks share: alternating measurements, medians and their spread, the machine."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata


def machine() -> str:
    """The machine and the versions that a figure belongs to."""
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return f"{cores} cores of {platform.machine()}, Python {platform.python_version()}, {versions}"


def spread(values: Sequence[float], unit: str, digits: int = 1) -> str:
    """Median, and the lowest and highest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f}, n={len(values)})"


def ratio(values: Mapping[str, Sequence[float]], ours: str, theirs: str) -> str:
    """Our values over theirs, pair by pair as they were measured in turn."""
    pairs = [a / b for a, b in zip(values[ours], values[theirs], strict=True)]
    return spread(pairs, "x", 3)

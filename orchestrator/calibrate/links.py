"""Bandwidth and latency of links, from all-gathers and reduce-scatters of several sizes."""

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.calibrate.lines import fitted
from orchestrator.contract.messages.measurements import Sample

CALLS = ("all-gather", "reduce-scatter")
"""Collectives whose time follows from the link alone. All-reduce and all-to-all are predicted from
them, so they are measured to check the prediction."""


class LinkRate(NamedTuple):
    ranks: int
    bus_bytes_per_s: float
    """Rate at which each rank sends in large collectives."""
    start_s: float
    """Seconds of the smallest collective."""


def link_of(samples: Sequence[Sample], *, across: bool) -> LinkRate | None:
    """None if no such collective was measured. T = start + bytes (n - 1) / (n bus)."""
    found = [one for one in samples if one.what in CALLS and one.across == across]
    if not found:
        return None
    ranks = found[0].ranks
    line = fitted([(float(one.size["bytes"]), one.seconds) for one in found])
    if line is None or line.slope <= 0:
        return None
    smallest = min(one.seconds for one in found)
    start = line.start if line.start > 0 else smallest / 2
    return LinkRate(ranks, (ranks - 1) / ranks / line.slope, start)

"""Constants of the performance model: how much of their nominal rates devices and links reach.

The numbers are data: `calibration/devices.toml` and `calibration/links.toml` have them with meaning
and source. `calibration/ranges.toml` has the errors of the model on published training runs, and
`calibration/comparison.toml` those of comparing two of them.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Struct

from orchestrator.contract.spec.limits import Above, AtLeast, AtMost

Count = Annotated[int, AtLeast(1)]
Rate = Annotated[float, Above(0)]
Share = Annotated[float, Above(0), AtMost(1)]
Amount = Annotated[float, AtLeast(0)]


class Tile(Struct, frozen=True, kw_only=True):
    """Part of the result of a matrix product that one processor computes at a time."""

    rows: Count
    columns: Count
    speed: Share
    """Relative to the first kind of tiles."""


class AttentionKernel(Struct, frozen=True, kw_only=True):
    """See `calibration/devices.toml`."""

    forward: Share
    backward: Share
    half: Amount
    few_forward: Amount
    few_backward: Amount
    narrow: Share
    wide: Share


class ErrorRange(Struct, frozen=True, kw_only=True):
    """Published speeds relative to planned ones, of runs that have something in common. Written by
    `python -m benchmarks.planner_accuracy --write`."""

    group: str
    """What the runs have in common, a `Group` of `plan/accuracy.py`."""
    center: Rate
    reach: Amount
    """9 of 10 published speeds of a source that the range does not rest on are inside `limits`."""
    runs: int
    sources: int

    def limits(self, widening: float) -> tuple[float, float]:
        """Lowest and highest speed. `widening` is more than 1 for a device with few sources."""
        factor = math.exp(self.reach * widening)
        return self.center / factor, self.center * factor


class Comparable(Struct, frozen=True, kw_only=True):
    """How many runs are published that are like a plan."""

    group: str
    architecture: str
    """Device table of the runs."""
    axes: str
    """Axes in use besides data parallelism, such as `tp pp`."""
    tokens: int
    """Longest sequences of the class."""
    runs: int


class Comparison(Struct, frozen=True, kw_only=True):
    """How well the model compares two meshes: pairs of published runs of one model on the same
    hosts with other meshes. Written by `python -m benchmarks.planner.comparison --write`."""

    typical: Amount
    """Median error of the ratio of two speeds. An error that both plans share cancels out."""
    pairs: int
    sources: int


class LinkCalibration(Struct, frozen=True, kw_only=True):
    """See `calibration/links.toml`."""

    share: Share
    half_bytes: Amount
    base_s: Amount


class Calibration(Struct, frozen=True, kw_only=True):
    """See `calibration/devices.toml` for what each number means."""

    gemm: Mapping[str, Share]
    attention: str
    """The kernel that torch runs on this device, one of `kernels`."""
    kernels: Mapping[str, AttentionKernel]
    memory: Share
    processors: Count
    tiles: tuple[Tile, ...]
    split: Share
    depth_half: Amount
    steady: Share
    gap_s: Amount
    host_op_s: Amount
    unit_s: Amount
    contention: Amount
    spread: Amount
    host_link: Rate
    host_memory: Rate
    certainty: Literal["measured", "derived", "guessed", "calibrated"]
    """`calibrated`: measured by `ndctl calibrate` on the hosts at hand."""
    architecture: str
    """Name of the table in `calibration/devices.toml`."""
    ranges: tuple[ErrorRange, ...]
    """One for each group of runs."""
    widening: Rate
    """Of the ranges, for this device."""
    comparable: tuple[Comparable, ...]
    """Published runs on this kind of device."""
    adapters: int
    """Published runs with adapters on this kind of device."""
    comparison: Comparison
    links: Mapping[str, LinkCalibration]
    """One entry for every kind of link."""
    steady_float8: Share | None = None
    """`steady` of float8 products; None: as for other types."""
    tp_hidden: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    accumulate_bytes: Amount = 10.0
    """Default: of ndctl's trainer."""
    reduce_hidden: Annotated[float, AtLeast(0), AtMost(1)] = 0.4
    """Default: of torch's FSDP."""
    pp_hidden: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    """Default: of torch's schedules."""
    pp_regathers: bool = True
    """The same."""
    even_stages: bool = False
    """See `Setup.even_stages`."""
    whole_weights: bool = False
    """Data-parallel ranks keep gathered weights, and reduce gradients once in a step."""
    software: str | None = None
    """Other training software that these constants describe, by name."""

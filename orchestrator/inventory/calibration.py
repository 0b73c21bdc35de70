"""Constants of the performance model: how much of their nominal rates devices and links reach.

The numbers are data: `calibration/devices.toml` and `calibration/links.toml` have them with meaning
and source. All come from measurements of single operations, none from the training of a model.
"""

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


class LinkCalibration(Struct, frozen=True, kw_only=True):
    """See `calibration/links.toml`."""

    share: Share
    half_bytes: Amount
    base_s: Amount


class Calibration(Struct, frozen=True, kw_only=True):
    """See `calibration/devices.toml` for what each number means."""

    gemm: Mapping[str, Share]
    attention_forward: Share
    attention_backward: Share
    attention_half: Amount
    attention_narrow: Share
    attention_wide: Share
    memory: Share
    processors: Count
    tiles: tuple[Tile, ...]
    split: Share
    depth_half: Amount
    steady: Share
    gap_s: Amount
    host_op_s: Amount
    sharded_op_s: Amount
    unit_s: Amount
    contention: Amount
    host_link: Rate
    host_memory: Rate
    certainty: Literal["measured", "derived", "guessed"]
    links: Mapping[str, LinkCalibration]
    """One entry for every kind of link."""

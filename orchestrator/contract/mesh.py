"""The device mesh: five degrees and the order of ranks in it."""

import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Struct

from orchestrator.contract.spec.limits import AtLeast

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: ranks with consecutive numbers differ in tp."""


class Mesh(Struct, frozen=True, kw_only=True):
    pp: Annotated[int, AtLeast(1)] = 1
    dp_replicate: Annotated[int, AtLeast(1)] = 1
    dp_shard: Annotated[int, AtLeast(1)] = 1
    cp: Annotated[int, AtLeast(1)] = 1
    tp: Annotated[int, AtLeast(1)] = 1

    @property
    def degrees(self) -> tuple[int, ...]:
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def coords(self, rank: int) -> Mapping[str, int]:
        """Axis -> coordinate of `rank`."""
        coords = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, coords[axis] = divmod(rank, degree)
        return {axis: coords[axis] for axis in AXES}

    def __str__(self) -> str:
        shown = [f"{a}={d}" for a, d in zip(AXES, self.degrees, strict=True) if d > 1]
        return " x ".join(shown) or "1 rank"

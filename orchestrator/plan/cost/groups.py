"""Groups of ranks that talk to each other, and which links they do it over.

Ranks are numbered with `pp` outermost and `tp` innermost, and host n has the n-th so many of them.
A group along an axis is every `stride`-th rank, `size` of them.
"""

import math
from dataclasses import dataclass
from typing import Literal

from orchestrator.inventory.profile import Fabric

BLOCK = "nvlink block"
LEVELS = ("host", BLOCK, "leaf", "spine")
Pattern = Literal["ring", "chain", "ends", "pairs"]


def pattern_of(axis: str, collective: str) -> Pattern:
    """Who sends to whom: stages to the next one, or the first and the last to each other; exchanges
    from each to every other; all else to the next rank around a ring, as NCCL's rings do and the
    keys of ring attention."""
    if axis == "pp" and collective in ("send", "exchange"):
        return "chain" if collective == "send" else "ends"
    return "pairs" if collective == "all-to-all" else "ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    size: int
    per_block: int
    """Of its ranks in one NVLink block; a host that is in none is one by itself."""
    hosts: int
    blocks: int
    leaves: int
    """Leaf switches that it is under."""

    @property
    def level(self) -> str:
        """The widest link that it crosses."""
        if self.hosts == 1:
            return "host"
        if self.blocks == 1:
            return BLOCK
        return "leaf" if self.leaves == 1 else "spine"

    def crossings(self, pattern: Pattern) -> dict[str, float]:
        """Which share of what its ranks send together crosses the links of each level; of NVLink
        blocks, where any does."""
        # Each level's links are those between its parts that no part of the next one has.
        parts = (self.size, self.hosts, self.blocks, self.leaves)
        crossed = [_between(number, self.size, pattern) for number in parts]
        return {
            level: (inner - outer) / max(1.0, crossed[0])
            for level, inner, outer in zip(LEVELS, crossed, [*crossed[1:], 0.0], strict=True)
            if level != BLOCK or inner > outer
        }


def _between(parts: int, size: int, pattern: Pattern) -> float:
    """How many of the hops of `size` ranks are between the `parts` that these are in."""
    match pattern:
        case "ring":
            return parts if parts > 1 else 0
        case "chain" | "ends":  # the group of an exchange is of the two that are the ends
            return parts - 1
        case "pairs":  # of each rank's messages to all others
            return size - size / parts


def group(size: int, stride: int, fabric: Fabric) -> Group:
    def within(ranks: int) -> int:
        """How many of the group are among so many neighbouring ranks."""
        return max(1, min(size, ranks // stride))

    devices = fabric.devices_per_host
    in_block = devices * fabric.hosts_per_block
    under_leaf = devices * (fabric.hosts_per_leaf or max(1, fabric.hosts))
    per_block = within(in_block)
    return Group(
        size=size,
        per_block=per_block,
        hosts=math.ceil(size / within(devices)),
        blocks=math.ceil(size / per_block),
        leaves=math.ceil(size / within(max(in_block, under_leaf))),
    )

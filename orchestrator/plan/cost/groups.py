"""Groups of ranks that communicate, and the links that they use.

Ranks are numbered with `pp` outermost and `tp` innermost, and hosts are filled in this order. A
group along an axis has `size` ranks, every `stride`-th one.
"""

import math
from typing import Literal

from msgspec import Struct

from orchestrator.inventory.profile import Fabric

BLOCK = "nvlink block"
LEVELS = ("host", BLOCK, "leaf", "spine")
Pattern = Literal["ring", "chain", "ends", "pairs"]


def pattern_of(axis: str, collective: str) -> Pattern:
    """The communication pattern of a collective.

    Pipeline stages send to the next one ("chain"); the first and the last exchange tied gradients
    ("ends"). In an all-to-all each rank sends to each other ("pairs"). All others send around a
    ring, as NCCL and ring attention do.
    """
    if axis == "pp" and collective in ("send", "exchange"):
        return "chain" if collective == "send" else "ends"
    return "pairs" if collective == "all-to-all" else "ring"


class Group(Struct, frozen=True, kw_only=True):
    size: int
    per_block: int
    """Ranks of the group in one NVLink block. A host in no block counts as a block."""
    hosts: int
    blocks: int
    leaves: int
    """Leaf switches above the group."""

    @property
    def level(self) -> str:
        """The highest level of links that the group crosses."""
        if self.hosts == 1:
            return "host"
        if self.blocks == 1:
            return BLOCK
        return "leaf" if self.leaves == 1 else "spine"

    def crossings(self, pattern: Pattern) -> dict[str, float]:
        """The share of the group's bytes that crosses the links of each level. NVLink blocks are
        listed only if they carry any."""
        # Bytes between hosts, for example, cross host links unless they also leave a block.
        parts = (self.size, self.hosts, self.blocks, self.leaves)
        crossed = [_between(number, self.size, pattern) for number in parts]
        return {
            level: (inner - outer) / max(1.0, crossed[0])
            for level, inner, outer in zip(LEVELS, crossed, [*crossed[1:], 0.0], strict=True)
            if level != BLOCK or inner > outer
        }


def _between(parts: int, size: int, pattern: Pattern) -> float:
    """How many hops of `size` ranks cross the borders of `parts` equal parts."""
    match pattern:
        case "ring":
            return parts if parts > 1 else 0
        case "chain" | "ends":  # a group of pattern "ends" has just the two ends
            return parts - 1
        case "pairs":  # per rank: its messages to ranks outside its own part
            return size - size / parts


def group(size: int, stride: int, fabric: Fabric) -> Group:
    def within(ranks: int) -> int:
        """How many ranks of the group are among `ranks` consecutive ranks."""
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

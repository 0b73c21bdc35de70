"""Groups of ranks that talk to each other, and which links they do it over.

Ranks are numbered with `pp` outermost and `tp` innermost, and host n has the n-th so many of them.
A group along an axis is every `stride`-th rank, `size` of them.
"""

import math
from dataclasses import dataclass

from orchestrator.cluster.profile import Fabric

LEVELS = ("host", "nvlink block", "leaf", "spine")


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
            return "nvlink block"
        return "leaf" if self.leaves == 1 else "spine"

    @property
    def crossings(self) -> dict[str, float]:
        """Which share of a ring's hops is at each level."""
        leaves = self.leaves if self.leaves > 1 else 0
        blocks = self.blocks if self.blocks > 1 else 0
        hosts = self.hosts if self.hosts > 1 else 0
        whole = self.size
        return {
            "host": (whole - hosts) / whole,
            "nvlink block": (hosts - blocks) / whole,
            "leaf": (blocks - leaves) / whole,
            "spine": leaves / whole,
        }


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

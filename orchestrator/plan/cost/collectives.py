"""What collectives send, and how long they take: latency and bandwidth (Thakur et al. 2005).

A rank of `size` sends, of `whole` bytes that all of them end up with or begin with: see each.
Seconds follow the model by which NCCL itself chooses an algorithm (`src/graph/tuning.cc`): a start,
a latency for each hop, and the bytes over the bus bandwidth.
"""

import math
from dataclasses import dataclass, field

from orchestrator.plan.cost.groups import Group

TREE_SHARE = 0.9
"""Of the bandwidth that a ring has (NCCL's tuning.cc: a tree's is multiplied by 0.9)."""


def ring_gather_bytes(size: int, whole: float) -> float:
    """All-gather, or reduce-scatter: every part but one passes each rank."""
    return whole * (size - 1) / size


def ring_all_reduce_bytes(size: int, whole: float) -> float:
    """A reduce-scatter and an all-gather: 2 (K - 1) / K of the whole (Patarasuk and Yuan 2009)."""
    return 2 * ring_gather_bytes(size, whole)


def tree_all_reduce_bytes(size: int, whole: float) -> float:
    """Up a tree and down again, what the busiest rank sends; two trees share it (Sanders et al.
    2009), so that each rank is a leaf in one of them."""
    return 2 * whole if size > 1 else 0.0


def exchange_bytes(size: int, own: float) -> float:
    """All-to-all of a rank's `own` bytes: all but the part that stays."""
    return own * (size - 1) / size


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What a group's ranks are connected by, calibrated."""

    group: Group
    bus_bytes_per_s: float
    """That each rank sends in large collectives."""
    pair_bytes_per_s: float
    """From one rank to one other."""
    near_bytes_per_s: float
    """From one rank to others of its NVLink block, or of its host where that is in none."""
    half_bytes: float
    base_s: float
    hop_s: float
    """Within a block, or a host."""
    far_hop_s: float
    """Between them."""
    contention: float
    """By how much a second of a collective slows down what is computed beside it, in seconds."""

    gather_fixed_s: float = field(init=False)
    """Of an all-gather, whatever its size."""
    gather_s_per_byte: float = field(init=False)
    sum_ways: tuple[tuple[float, float], ...] = field(init=False)
    """Of an all-reduce by a ring and by trees: seconds whatever its size, and for each byte."""

    def __post_init__(self) -> None:
        size, blocks = self.group.size, self.group.blocks
        start = self.base_s + self.half_bytes / self.bus_bytes_per_s
        near, far = size - blocks, blocks - 1
        ring = start + near * self.hop_s + far * self.far_hop_s
        deep = math.ceil(math.log2(blocks))
        tree = start + 2 * ((self.group.per_block - 1) * self.hop_s + deep * self.far_hop_s)
        per_byte = ring_gather_bytes(size, 1) / self.bus_bytes_per_s
        tree_per_byte = tree_all_reduce_bytes(size, 1) / (TREE_SHARE * self.bus_bytes_per_s)
        store = object.__setattr__
        store(self, "gather_fixed_s", ring)
        store(self, "gather_s_per_byte", per_byte)
        store(self, "sum_ways", ((2 * ring - start, 2 * per_byte), (tree, tree_per_byte)))

    def gather_s(self, whole: float) -> float:
        """All-gather or reduce-scatter, in a ring."""
        return self.gather_fixed_s + whole * self.gather_s_per_byte if self.group.size > 1 else 0.0

    def all_reduce_s(self, whole: float) -> float:
        """By the faster of a ring and trees."""
        if self.group.size == 1:
            return 0.0
        (ring, ring_byte), (tree, tree_byte) = self.sum_ways
        return min(ring + whole * ring_byte, tree + whole * tree_byte)

    def exchange_s(self, own: float) -> float:
        """All-to-all: every rank talks to every other, most of them far away."""
        size = self.group.size
        if size == 1:
            return 0.0
        outside = own * (size - self.group.per_block) / size
        inside = exchange_bytes(size, own) - outside
        seconds = outside / self.pair_bytes_per_s + inside / self.near_bytes_per_s
        hop = self.far_hop_s if self.group.blocks > 1 else self.hop_s
        return self.base_s + hop + self.half_bytes / self.bus_bytes_per_s + seconds

    def send_s(self, size: float) -> float:
        """To a neighbour along the axis, the farthest of them."""
        if self.group.size == 1:
            return 0.0
        hop = self.far_hop_s if self.group.blocks > 1 else self.hop_s
        return self.base_s + hop + size / self.pair_bytes_per_s

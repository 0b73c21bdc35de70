"""Bytes and seconds of collectives, from latency and bandwidth (Thakur et al. 2005).

The functions return the bytes that one of `size` ranks sends; `whole` is the size of the full
buffer. Seconds follow the model that NCCL uses to choose an algorithm (`src/graph/tuning.cc`): a
start-up time, a latency per hop, and the bytes divided by the bus bandwidth.
"""

import math
from functools import cached_property

from msgspec import Struct

from orchestrator.plan.cost.groups import Group

TREE_SHARE = 0.9
"""Bandwidth of a tree relative to a ring (NCCL's tuning.cc multiplies a tree's by 0.9)."""


def ring_gather_bytes(size: int, whole: float) -> float:
    """All-gather or reduce-scatter: each rank sends all parts but one."""
    return whole * (size - 1) / size


def ring_all_reduce_bytes(size: int, whole: float) -> float:
    """A reduce-scatter and an all-gather: 2 (K - 1) / K of the whole (Patarasuk and Yuan 2009)."""
    return 2 * ring_gather_bytes(size, whole)


def tree_all_reduce_bytes(size: int, whole: float) -> float:
    """Bytes that the busiest rank sends up and down a tree. Two trees share the data, so that each
    rank is a leaf in one of them (Sanders et al. 2009)."""
    return 2 * whole if size > 1 else 0.0


def exchange_bytes(size: int, own: float) -> float:
    """All-to-all: a rank sends its `own` bytes except the part that it keeps."""
    return own * (size - 1) / size


class Wire(Struct, frozen=True, kw_only=True, dict=True):
    """The calibrated links between the ranks of a group."""

    group: Group
    bus_bytes_per_s: float
    """Rate at which each rank sends in large collectives."""
    pair_bytes_per_s: float
    """Rate from one rank to another."""
    near_bytes_per_s: float
    """Rate inside an NVLink block, or inside a host that is in no block."""
    half_bytes: float
    """Bytes at which a collective reaches half of its bandwidth."""
    base_s: float
    hop_s: float
    """Latency inside a block, or inside a host."""
    far_hop_s: float
    """Latency between blocks, or between hosts."""
    contention: float
    """Seconds by which one second of a collective delays the computation that overlaps with it."""

    @cached_property
    def gather_fixed_s(self) -> float:
        """Seconds of an all-gather that do not depend on its size."""
        size, blocks = self.group.size, self.group.blocks
        return self.start_s + (size - blocks) * self.hop_s + (blocks - 1) * self.far_hop_s

    @cached_property
    def gather_s_per_byte(self) -> float:
        return ring_gather_bytes(self.group.size, 1) / self.bus_bytes_per_s

    @cached_property
    def all_reduce_costs(self) -> tuple[tuple[float, float], ...]:
        """For a ring and for trees: fixed seconds, and seconds per byte, of an all-reduce."""
        size, deep = self.group.size, math.ceil(math.log2(self.group.blocks))
        hops_s = (self.group.per_block - 1) * self.hop_s + deep * self.far_hop_s
        tree_per_byte = tree_all_reduce_bytes(size, 1) / (TREE_SHARE * self.bus_bytes_per_s)
        ring = (2 * self.gather_fixed_s - self.start_s, 2 * self.gather_s_per_byte)
        return ring, (self.start_s + 2 * hops_s, tree_per_byte)

    @property
    def start_s(self) -> float:
        return self.base_s + self.half_bytes / self.bus_bytes_per_s

    def gather_s(self, whole: float) -> float:
        """Seconds of an all-gather or reduce-scatter in a ring."""
        return self.gather_fixed_s + whole * self.gather_s_per_byte if self.group.size > 1 else 0.0

    def all_reduce_s(self, whole: float) -> float:
        """Seconds of an all-reduce with the faster of ring and trees."""
        if self.group.size == 1:
            return 0.0
        (ring, ring_byte), (tree, tree_byte) = self.all_reduce_costs
        return min(ring + whole * ring_byte, tree + whole * tree_byte)

    def exchange_s(self, own: float) -> float:
        """Seconds of an all-to-all. Most peers of a rank are outside its block."""
        size = self.group.size
        if size == 1:
            return 0.0
        outside = own * (size - self.group.per_block) / size
        inside = exchange_bytes(size, own) - outside
        seconds = outside / self.pair_bytes_per_s + inside / self.near_bytes_per_s
        hop = self.far_hop_s if self.group.blocks > 1 else self.hop_s
        return self.base_s + hop + self.half_bytes / self.bus_bytes_per_s + seconds

    def send_s(self, size: float) -> float:
        """Seconds to send `size` bytes to the farthest neighbour along the axis."""
        if self.group.size == 1:
            return 0.0
        hop = self.far_hop_s if self.group.blocks > 1 else self.hop_s
        return self.base_s + hop + size / self.pair_bytes_per_s

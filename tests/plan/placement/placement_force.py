"""Computes the cost of every way to place a few nodes on a small tree.

Two hosts on one switch can be exchanged, and so can two branches of the same shape. Of ways that
differ only by such exchanges, one is computed. 8 nodes on all trees with 8 hosts are 660,032 ways
(OEIS A000311) instead of 261 x 8!. No way is skipped because of its cost.

The cost is computed differently than in `placement/cost.py`: it counts the bytes that stay below
switches instead of those that leave them. Each switch that two nodes share saves their bytes one
level.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Traffic
from orchestrator.plan.placement.edges import edges_of, flows_of
from tests.plan.placement.placement_trees import Shape


@dataclass
class Force:
    """The ways to place the nodes of one mesh, one rank each. A set of nodes is an int with one bit
    per node."""

    nodes: int
    edges: list[tuple[int, int]]
    """(both ends as a set, bytes between them)"""
    stays: list[int] = field(default_factory=list)
    """The bytes between the nodes of each set."""
    known: dict[tuple[Shape, int, int], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh, sent: Sequence[Traffic]) -> "Force":
        edges = [
            (1 << one | 1 << other, size)
            for size, (ones, others) in edges_of(mesh, 1, flows_of(mesh, sent)).items()
            for one, other in zip(ones, others, strict=True)
        ]
        stays = [
            sum(size for ends, size in edges if ends & members == ends)
            for members in range(1 << mesh.world_size)
        ]
        return cls(mesh.world_size, edges, stays)

    def costs(self, tree: Shape) -> list[int]:
        """The cost of every way to place the nodes on `tree`."""
        dearest = sum(size for _, size in self.edges) * (1 + depth(tree))
        return [dearest - spared for spared in self._over(tree, (1 << self.nodes) - 1, 0)]

    def _over(self, branches: Shape, members: int, least: int) -> list[int]:
        """The bytes saved by each way to distribute `members` over `branches`. The number of the
        first branch's set is at least `least`, so that exchanges of equal branches count once."""
        if not branches:
            return [0]
        if (branches, members, least) not in self.known:
            first, rest = branches[0], branches[1:]
            alike = bool(rest) and rest[0] == first
            self.known[branches, members, least] = [
                one + other
                for part in _subsets(members)
                if part >= least
                and part.bit_count() <= hosts_below(first)
                and (members ^ part).bit_count() <= sum(map(hosts_below, rest))
                for other in self._over(rest, members ^ part, part if alike else 0)
                for one in self._below(first, part)
            ]
        return self.known[branches, members, least]

    def _below(self, switch: Shape, members: int) -> list[int]:
        """The bytes saved by each way to place `members` below `switch`, or on a host."""
        return [self.stays[members] + spared for spared in self._over(switch, members, 0)]


def hosts_below(shape: Shape) -> int:
    return sum(map(hosts_below, shape)) if shape else 1


def depth(tree: Shape) -> int:
    """Levels of switches between the root and the hosts that are farthest from it."""
    return max((1 + depth(below) for below in tree if below), default=0)


def _subsets(members: int) -> Iterator[int]:
    part = members
    while True:
        yield part
        if not part:
            return
        part = (part - 1) & members

"""The optimal placement of a few nodes, for any traffic, by dynamic programming.

The bytes that leave a switch depend only on the set of nodes below it. So each switch has a table
from sets of nodes to the lowest cost of placing the set below it, and the table of a switch is the
merge of its children's tables. A merge tries each subset of each set, which is 3^n pairs. Switches
of equal shape share a table, and n nodes need at most n switches of one shape. A set is an integer
with one bit per node.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Union

from orchestrator.plan.placement.edges import Edges
from orchestrator.plan.placement.tree import Switch, Tree

MOST_NODES = 8
MOST_MERGES = 200
"""Limit of merges. With 8 nodes each tries 6561 subsets, so all take about a second."""

Shape = Union[int, tuple["Shape", ...]]  # noqa: UP007 - a string has no |
"""For a leaf the number of hosts; for another switch the shapes of its children."""


@dataclass(slots=True)
class _Table:
    costs: list[float]
    """By set of nodes: the lowest cost below the switch, its own cut included."""
    shares: list[list[int]] = field(default_factory=list)
    """For each child after the first, by set of nodes below this child and those before: the subset
    that this child gets."""


@dataclass(slots=True)
class _Solver:
    nodes: int
    cuts: list[int]
    tables: dict[Shape, _Table] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    """Keyed by `id` of the switch."""
    merges: int = 0

    def shape(self, switch: Switch) -> Shape:
        """The shape of `switch`, without hosts and children that so few nodes never need."""
        if not switch.children:
            found: Shape = min(len(switch.hosts), self.nodes)
        else:
            shapes = [self.shape(child) for child in switch.children]
            found = tuple(sorted(self._enough(shapes), key=repr))
            if found not in self.tables:
                self.merges += len(found) - 1
        self.shapes[id(switch)] = found
        self.tables.setdefault(found, _Table(costs=[]))
        return found

    def _enough(self, shapes: Iterable[Shape]) -> Iterable[Shape]:
        for shape, times in Counter(shapes).items():
            yield from [shape] * min(times, self.nodes)

    def table(self, shape: Shape, cut: bool = True) -> _Table:
        known = self.tables[shape]
        if known.costs:
            return known
        if isinstance(shape, int):
            room = [0.0 if s.bit_count() <= shape else math.inf for s in range(1 << self.nodes)]
            known.costs = room
        else:
            known.costs = self.table(shape[0]).costs
            for child in shape[1:]:
                known.costs, share = _merged(known.costs, self.table(child).costs)
                known.shares.append(share)
        if cut:
            known.costs = [a + b for a, b in zip(known.costs, self.cuts, strict=True)]
        return known

    def assign(self, switch: Switch, nodes: int, placed: list[int]) -> None:
        """Write the hosts of the set `nodes`, all below `switch`, into `placed`."""
        if not switch.children:
            members = [node for node in range(self.nodes) if nodes >> node & 1]
            for node, host in zip(members, switch.hosts, strict=False):
                placed[node] = host
            return
        shape = self.shapes[id(switch)]
        children = self._in_order(switch, shape)
        shares = self.tables[shape].shares
        for child, share in zip(children[:0:-1], shares[::-1], strict=True):
            self.assign(child, share[nodes], placed)
            nodes ^= share[nodes]
        self.assign(children[0], nodes, placed)

    def _in_order(self, switch: Switch, shape: Shape) -> list[Switch]:
        """The children in `shape`, in the order in which they were merged."""
        assert isinstance(shape, tuple)
        by_shape: dict[Shape, list[Switch]] = {}
        for child in reversed(switch.children):
            by_shape.setdefault(self.shapes[id(child)], []).append(child)
        return [by_shape[one].pop() for one in shape]


def best_placement(tree: Tree, edges: Edges, nodes: int) -> list[int] | None:
    """The cheapest hosts for the nodes, by number in `tree`; None if that is too much work."""
    if nodes > MOST_NODES or not tree.height:
        return None
    solver = _Solver(nodes=nodes, cuts=_cuts(edges, nodes))
    root = solver.shape(tree.root)
    if solver.merges > MOST_MERGES:
        return None
    solver.table(root, cut=False)
    placed = [0] * nodes
    solver.assign(tree.root, (1 << nodes) - 1, placed)
    return placed


def _cuts(edges: Edges, nodes: int) -> list[int]:
    """By set of nodes: the bytes between the set and all other nodes."""
    cuts = [0] * (1 << nodes)
    for size, (ones, others) in edges.items():
        for one, other in zip(ones, others, strict=True):
            for members in range(1 << nodes):
                if (members >> one ^ members >> other) & 1:
                    cuts[members] += size
    return cuts


def _merged(before: Sequence[float], child: Sequence[float]) -> tuple[list[float], list[int]]:
    """By set: the lowest cost with one more child, and the subset that this child gets."""
    costs, shares = [0.0] * len(before), [0] * len(before)
    for members in range(len(before)):
        best, share, part = before[members] + child[0], 0, members
        while part:
            cost = before[members ^ part] + child[part]
            if cost < best:
                best, share = cost, part
            part = (part - 1) & members
        costs[members], shares[members] = best, share
    return costs, shares

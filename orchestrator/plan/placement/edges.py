"""The traffic between the nodes of a mesh in a step.

A node is a place for a host: node n holds ranks n*r to n*r+r-1. A collective runs as a ring over
its group in rank order, as NCCL's rings do across hosts. Pipeline stages send to the next one, and
the first and the last exchange tied gradients. In an all-to-all each rank sends to each other.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.plan import Traffic
from orchestrator.plan.cost.groups import Pattern, pattern_of

UNKNOWN_STEP = 16
"""Assumed ratio of an axis's traffic to that of the next outer axis, if no traffic is known."""


class Flow(Struct, frozen=True):
    axes: tuple[str, ...]
    """Axes of the group, outermost first."""
    pattern: Pattern
    bytes_per_rank: int


def flows_of(mesh: Mesh, traffic: Iterable[Traffic]) -> tuple[Flow, ...]:
    """`traffic` by group and pattern. Without traffic, inner axes are assumed to send more."""
    totals: dict[tuple[tuple[str, ...], Pattern], int] = defaultdict(int)
    for row in traffic:
        named = row.axis.split(" x ")
        axes = tuple(axis for axis in AXES if axis in named and getattr(mesh, axis) > 1)
        totals[axes, pattern_of(row.axis, row.collective)] += row.bytes_per_step
    if not totals:
        inner_first = [axis for axis in reversed(AXES) if getattr(mesh, axis) > 1]
        for depth, axis in enumerate(inner_first):
            totals[(axis,), pattern_of(axis, "send")] = UNKNOWN_STEP ** (
                len(inner_first) - 1 - depth
            )
    return tuple(
        Flow(axes, pattern, size) for (axes, pattern), size in totals.items() if axes and size
    )


def strides(mesh: Mesh) -> dict[str, int]:
    """Distance in ranks between neighbours along each axis."""
    inner = itertools.accumulate(reversed(mesh.degrees), lambda a, b: a * b, initial=1)
    return dict(zip(reversed(AXES), inner, strict=False))


def groups(mesh: Mesh, axes: Sequence[str]) -> Iterator[list[int]]:
    """The ranks of each group along `axes`, in rank order."""
    step = strides(mesh)
    inside = _offsets([(getattr(mesh, axis), step[axis]) for axis in axes])
    outside = _offsets([(getattr(mesh, axis), step[axis]) for axis in AXES if axis not in axes])
    for first in outside:
        yield [first + offset for offset in inside]


def _offsets(digits: Sequence[tuple[int, int]]) -> list[int]:
    """The offsets of all combinations of `digits`: (count, step) pairs, outermost first."""
    found = [0]
    for count, step in digits:
        found = [base + number * step for base in found for number in range(count)]
    return found


Edges = Mapping[int, tuple[Sequence[int], Sequence[int]]]
"""Bytes -> the pairs of nodes that exchange this much, as two sequences of equal length."""


def edges_of(mesh: Mesh, ranks_per_host: int, flows: Iterable[Flow]) -> Edges:
    """The bytes between nodes, both directions added."""
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for flow in flows:
        for group in groups(mesh, flow.axes):
            nodes = [rank // ranks_per_host for rank in group]
            for pair, size in _pairs(flow, nodes):
                sent[pair] += size
    sides: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for (one, other), size in sorted(sent.items()):
        sides[size][0].append(one)
        sides[size][1].append(other)
    return dict(sides)


def _pairs(flow: Flow, nodes: list[int]) -> Iterator[tuple[tuple[int, int], int]]:
    if nodes[0] == nodes[-1]:
        return
    if flow.pattern == "pairs":
        share = math.ceil(flow.bytes_per_rank / (len(nodes) - 1))
        links: Iterable[tuple[int, int]] = itertools.permutations(nodes, 2)
    elif flow.pattern == "ends":
        share = 2 * flow.bytes_per_rank
        links = [(nodes[0], nodes[-1])]
    else:
        share = flow.bytes_per_rank
        nexts = nodes[1:] + (nodes[:1] if flow.pattern == "ring" else [])
        links = zip(nodes, nexts, strict=False)
    for one, other in links:
        if one != other:
            yield (min(one, other), max(one, other)), share

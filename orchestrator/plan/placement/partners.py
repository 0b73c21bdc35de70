"""Chooses the hosts that keep copies of each host's checkpoints in memory. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile

from orchestrator.contract.mesh import AXES, Mesh

MOST_SHIFTS = 12
"""Shifts that are compared. Each takes a look at every host."""
GROUP_AXES = tuple(axis for axis in AXES if axis != "dp_shard")
"""Axes whose groups a partner should not share: what breaks a group often breaks all of it. Ranks
that differ in `dp_shard` alone are of one group, but then every host of an FSDP job is."""


def partners_of(
    mesh: Mesh,
    ranks_per_host: int,
    hosts: Sequence[str],
    switches: Mapping[str, tuple[str, ...]],
    copies: int,
) -> tuple[tuple[int, ...], ...]:
    """For each node rank, the node ranks that keep its copies: at most `copies`, fewer if there are
    fewer other hosts.

    Each host keeps copies of as many hosts as keep its own. Partners are behind other switches
    where that is possible, and then in other parallel groups.

    Args:
        hosts: in node-rank order.
        switches: host -> the switches above it, outermost first; a host may be missing.
    """
    # Hosts of one switch follow one another in this order, so a shift by the size of the largest
    # group takes each host to another switch.
    order = sorted(range(len(hosts)), key=lambda node: (switches.get(hosts[node], ()), node))
    above = [switches.get(host, ()) for host in hosts]
    groups = [_groups(mesh, ranks_per_host, node) for node in range(len(hosts))]
    chosen: tuple[tuple[int, ...], ...] = tuple(() for _ in hosts)
    for _ in range(min(copies, len(hosts) - 1)):
        ways = [*_along_switches(order, above), *_along_axes(mesh, ranks_per_host, len(hosts))]
        longer = [
            tuple((*before, targets[node]) for node, before in enumerate(chosen))
            for targets in ways
        ]
        chosen = min(longer, key=partial(_cost, above=above, groups=groups))
    return chosen


def _along_switches(
    order: Sequence[int], above: Sequence[tuple[str, ...]]
) -> Iterator[Mapping[int, int]]:
    """Ways to give each node a partner: shifts in the order of switches, evenly spaced, and those
    by the size of the largest group."""
    num, largest = len(order), max(Counter(above).values())
    some = range(1, num, math.ceil(num / MOST_SHIFTS))
    shifts = {*some, *(shift for shift in (largest, 2 * largest) if shift < num)}
    for shift in sorted(shifts):
        yield dict(zip(order, [*order[shift:], *order[:shift]], strict=True))


def _along_axes(mesh: Mesh, ranks_per_host: int, num: int) -> Iterator[Mapping[int, int]]:
    """Ways that lead to another coordinate on each axis at once, where hosts are a grid."""
    grid = _grid(mesh, ranks_per_host)
    if math.prod(grid) != num:
        return
    places = list(itertools.product(*map(range, grid)))
    node_at = {place: node for node, place in enumerate(places)}
    for step in range(1, 1 + MOST_SHIFTS // 4):
        yield {
            node: node_at[tuple((at + step) % size for at, size in zip(place, grid, strict=True))]
            for node, place in enumerate(places)
        }


def _grid(mesh: Mesh, ranks_per_host: int) -> Sequence[int]:
    """Hosts along each axis, outermost first, if each host has a block of whole inner axes."""
    sizes, left = [], ranks_per_host
    for degree in reversed(mesh.degrees):
        inside = math.gcd(degree, left)
        sizes.append(degree // inside)
        left //= inside
    return sizes[::-1]


def _cost(
    partners: Sequence[tuple[int, ...]],
    above: Sequence[tuple[str, ...]],
    groups: Sequence[frozenset[tuple[int, ...]]],
) -> tuple[int, int, int]:
    """Of the last partner of each host: copies that are no use, levels of switches that it shares
    with the host and the other partners, and those in a parallel group of the host."""
    twice = near = shared = 0
    for node, (*before, target) in enumerate(partners):
        others = (node, *before)
        twice += target in others
        near += sum(_common(above[target], above[other]) for other in others)
        shared += bool(groups[node] & groups[target])
    return twice, near, shared


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many switches are above both, from the outermost down."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _groups(mesh: Mesh, ranks_per_host: int, node: int) -> frozenset[tuple[int, ...]]:
    """The parallel groups of a host's ranks along each axis with more than one member."""
    found = set()
    first = node * ranks_per_host
    for rank in range(first, min(first + ranks_per_host, mesh.world_size)):
        coords = mesh.coords(rank)
        for number, axis in enumerate(GROUP_AXES):
            if getattr(mesh, axis) > 1:
                rest = (coords[other] for other in AXES if other != axis)
                found.add((number, *rest))
    return frozenset(found)

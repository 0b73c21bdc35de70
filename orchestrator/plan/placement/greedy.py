"""Good placements of many nodes, by packing tiles of the mesh into switches.

The nodes of a mesh form a grid of its axes. A tile of nodes fills a leaf, a tile of those tiles
fills a spine, and so on. Which tiles are cheapest depends on the traffic of each axis. A candidate
has one tile per level, which gives an order of the nodes, and sizes at which the order can be cut
cheaply. Packing is like bin packing: whole tiles while they fit, then the rest in as few pieces as
possible.
"""

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.plan.placement.edges import Flow, strides
from orchestrator.plan.placement.tree import Switch, Tree

TILES = 6
"""Tiles per level that are tried, those with the lowest estimated cost first."""


class Grid(Struct, frozen=True):
    """The nodes of a mesh by axis, outermost first, without axes inside a host."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    runs: tuple[tuple[tuple[int, ...], int], ...]
    """For each flow between hosts: its axes, innermost first, as indices into `axes`, and the bytes
    that a node sends to the next one along them."""

    @property
    def nodes(self) -> int:
        return math.prod(self.sizes)


def grid_of(mesh: Mesh, ranks_per_host: int, flows: Sequence[Flow]) -> Grid:
    """The grid of `mesh`. If hosts hold broken parts of an axis, all nodes are one row."""
    step = strides(mesh)
    sizes: dict[str, int] = {}
    for axis in AXES:
        degree = getattr(mesh, axis)
        size = _size(step[axis], degree, ranks_per_host)
        if size is None:
            return Grid(("nodes",), (mesh.world_size // ranks_per_host,), (((0,), 1),))
        if size > 1:
            sizes[axis] = size
    axes = tuple(sizes)
    runs = []
    for flow in flows:
        numbers = tuple(axes.index(axis) for axis in reversed(flow.axes) if axis in sizes)
        if numbers:
            side_by_side = min(step[flow.axes[-1]], ranks_per_host)
            runs.append((numbers, side_by_side * flow.bytes_per_rank))
    return Grid(axes, tuple(sizes.values()), tuple(runs))


def _size(step: int, degree: int, ranks_per_host: int) -> int | None:
    """Nodes along an axis; None if hosts hold broken parts of it."""
    if degree == 1 or ranks_per_host % (step * degree) == 0:
        return 1
    if step % ranks_per_host == 0:
        return degree
    if ranks_per_host % step == 0 and step * degree % ranks_per_host == 0:
        return step * degree // ranks_per_host
    return None


Tile = tuple[int, ...]
"""Number of nodes along each axis of the grid."""


class Candidate(Struct, frozen=True):
    order: tuple[int, ...]
    """The nodes, neighbours in the grid next to each other."""
    cuts: tuple[int, ...]
    """The order can be cut cheaply at multiples of these sizes; largest first, the last is 1."""
    tile: int
    """Nodes that should stay together in one leaf."""


def candidates(grid: Grid, tree: Tree) -> Iterator[Candidate]:
    """Each candidate once, those with the lowest estimated cost first."""
    seen = set()
    for tiles in itertools.chain(_tilings(grid, tree), _rows(grid)):
        if tiles not in seen:
            seen.add(tiles)
            yield _candidate(grid, tiles)


def _tilings(grid: Grid, tree: Tree) -> Iterator[tuple[Tile, ...]]:
    """Chains of tiles, one per level, leaves first (a beam search of width `TILES`)."""
    capacities = [_capacities(above) for above in tree.above]
    one = (1,) * len(grid.sizes)
    chains: list[tuple[float, tuple[Tile, ...]]] = [(0.0, ())]
    for capacity in capacities:
        grown = [
            (cost + _estimated_cost(grid, tile, capacity), (*chain, tile))
            for cost, chain in chains
            for tile in _tiles(grid.sizes, chain[-1] if chain else one, max(capacity))
        ]
        chains = sorted(grown)[:TILES]
    for _, chain in chains:
        yield chain


def _capacities(above: Sequence[int]) -> list[int]:
    """Number of hosts below each switch of a level."""
    counts = [0] * (max(above) + 1)
    for switch in above:
        counts[switch] += 1
    return counts


def _tiles(sizes: Tile, below: Tile, room: int) -> Iterator[Tile]:
    """Tiles that consist of tiles `below`, divide the grid, and fit into `room` hosts."""
    choices = [
        [below_ * many for many in range(1, size // below_ + 1) if size // below_ % many == 0]
        for size, below_ in zip(sizes, below, strict=True)
    ]
    for tile in itertools.product(*choices):
        if math.prod(tile) <= room or tile == below:
            yield tile


def _estimated_cost(grid: Grid, tile: Tile, capacities: Sequence[int]) -> float:
    """Estimate of the bytes that leave the switches of a level. Tiles that must be cut count
    twice."""
    size = math.prod(tile)
    whole = min(grid.nodes, sum(capacity // size * size for capacity in capacities))
    crossing = 0.0
    for axes, sent in grid.runs:
        run = 1
        for axis in axes:
            run *= tile[axis]
            if tile[axis] < grid.sizes[axis]:
                crossing += sent * grid.nodes / run
                break
    cut = sum(2 * sent for _, sent in grid.runs) * (grid.nodes - whole) / size
    return crossing + cut


def _rows(grid: Grid) -> Iterator[tuple[Tile, ...]]:
    """Tiles that are whole axes, in any order, those with most traffic first. The first tile may
    have several axes and be larger than any leaf; then several leaves share it."""
    for axes in itertools.permutations(_heavy_first(grid)):
        tiles, tile = [], [1] * len(grid.sizes)
        for axis in axes:
            tile[axis] = grid.sizes[axis]
            tiles.append(tuple(tile))
        for first in range(max(1, len(tiles) - 1)):
            yield tuple(tiles[first:])


def _heavy_first(grid: Grid) -> list[int]:
    """Axes by descending traffic."""
    weights = [sum(sent for axes, sent in grid.runs if axes[0] == a) for a in range(len(grid.axes))]
    return sorted(range(len(grid.axes)), key=lambda axis: (-weights[axis], -axis))


def _candidate(grid: Grid, tiles: tuple[Tile, ...]) -> Candidate:
    heavy_first = _heavy_first(grid)
    steps = [math.prod(grid.sizes[axis + 1 :]) for axis in range(len(grid.axes))]
    order, cuts, have = [0], [1], [1] * len(grid.sizes)
    for tile in (*tiles, grid.sizes):
        for axis in heavy_first:
            many = tile[axis] // have[axis]
            step = steps[axis] * have[axis]
            order = [node + number * step for number in range(many) for node in order]
            have[axis] = tile[axis]
            cuts.append(len(order))
    return Candidate(tuple(order), tuple(sorted(set(cuts), reverse=True)), math.prod(tiles[0]))


Part = tuple[int, int]
"""Start and number of nodes of a contiguous part of an order."""


def pack(tree: Tree, candidate: Candidate, aligned: bool = True) -> list[int]:
    """The host of each node: first whole tiles where they fit, then the rest.

    Parts that are too large for any switch are cut at the cheap sizes of `candidate` or, if not
    `aligned`, where the largest switch is full.
    """
    tile = candidate.tile
    packer = _Packer(cuts=candidate.cuts if aligned else (1,), hosts=[0] * len(candidate.order))
    whole = min(packer.measure(tree.root, tile), len(candidate.order) // tile * tile)
    if whole:
        packer.fill(tree.root, [(0, whole)])
    packer.measure(tree.root, 1)
    rest = range(whole, len(candidate.order), tile)
    packer.fill(tree.root, [(at, min(tile, len(candidate.order) - at)) for at in rest])
    placed = [0] * len(candidate.order)
    for node, host in zip(candidate.order, packer.hosts, strict=True):
        placed[node] = host
    return placed


@dataclass(slots=True)
class _Packer:
    cuts: tuple[int, ...]
    hosts: list[int]
    """By position in the order."""
    used: dict[int, int] = field(default_factory=dict)
    """Hosts that are used, keyed by `id` of the leaf."""
    room: dict[int, int] = field(default_factory=dict)
    """Free hosts in whole tiles, keyed by `id` of the switch."""

    def measure(self, switch: Switch, tile: int) -> int:
        """Compute the room for whole tiles below `switch` and all switches under it."""
        if switch.children:
            room = sum(self.measure(child, tile) for child in switch.children)
        else:
            room = (len(switch.hosts) - self.used.get(id(switch), 0)) // tile * tile
        self.room[id(switch)] = room
        return room

    def fill(self, switch: Switch, parts: Sequence[Part]) -> None:
        """Place `parts` below `switch`, which has enough room."""
        if switch.children:
            for child, its in zip(switch.children, self._shared(switch, parts), strict=True):
                if its:
                    self.fill(child, its)
            return
        used = self.used.get(id(switch), 0)
        for start, length in parts:
            self.hosts[start : start + length] = switch.hosts[used : used + length]
            used += length
        self.used[id(switch)] = used

    def _shared(self, switch: Switch, parts: Sequence[Part]) -> list[list[Part]]:
        """The parts that each child gets. A part goes to the smallest child that it fits into, else
        it is cut and the largest child is filled first."""
        shares: list[list[Part]] = [[] for _ in switch.children]
        rooms = sorted((self.room[id(c)], -number) for number, c in enumerate(switch.children))
        for start, length in parts:
            at, left = start, length
            while left:
                fits = bisect_left(rooms, (left, -len(shares)))
                if fits < len(rooms):
                    same = bisect_right(rooms, (rooms[fits][0], 0))
                    room, number = rooms.pop(same - 1)
                    piece = left
                else:
                    room, number = rooms.pop()
                    cut = next(size for size in self.cuts if size <= room)
                    piece = room // cut * cut
                shares[-number].append((at, piece))
                if room > piece:
                    insort(rooms, (room - piece, number))
                at, left = at + piece, left - piece
        return shares

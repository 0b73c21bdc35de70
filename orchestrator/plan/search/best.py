"""Best-first search for the best meshes, and the reason why each other mesh is not shown.

Meshes with the same pp, cp and tp differ only in data-parallel traffic and the optimizer, so they
share one lower bound (`_Node`). Nodes are expanded in the order of their bounds; a cheap bound is
replaced by a tighter one when its turn comes. The search ends when enough meshes are better than
the next bound, because no other node can then be among the best.

`tests/plan/search/test_best.py` compares it with an exhaustive search.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory, Rejected
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.train_spec import Checkpointing
from orchestrator.plan.cost.layers import Slice
from orchestrator.plan.cost.lower_bound import LowerBound, lower_bound_of, lower_bound_s
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.timeline import passes_s, slice_of
from orchestrator.plan.memory.peak_memory import min_peak_bytes
from orchestrator.plan.search.admitted import (
    checkpointings,
    micro_sizes,
    pipelines,
    reductions,
    reshardings,
)
from orchestrator.plan.search.families import Bar, rejected_families
from orchestrator.plan.search.meshes import meshes
from orchestrator.plan.search.rules import first_refusal
from orchestrator.plan.search.search_space import RANKS, Option, Rank, Space, standing_bytes
from orchestrator.plan.setup import Setup, setup_of

SHOWN = 5
"""Alternatives beside the best mesh."""
LEVELS = 2
"""Tighter bounds after the first one."""
ROUNDING = 1 - 1e-8


class Found(Struct, frozen=True):
    options: tuple[Option, ...]
    """The best mesh and up to `SHOWN` alternatives, the best first; empty if nothing fits."""
    rejected: tuple[Rejected, ...]
    least: Memory | None
    """The smallest need among the meshes that do not fit."""


@dataclass(eq=False)
class _Node:
    """One pipeline and micro batch for all meshes with the same pp, cp and tp."""

    space: Space
    family: Sequence[Mesh]
    pipeline: PipelineSpec
    micro: int
    micro_batches: int
    smallest: int
    """The smallest micro batch of its pipeline."""

    @cached_property
    def setups(self) -> tuple[Setup, ...]:
        """One for each checkpointing, least recomputation first, with the mesh that shards most.
        Computed lazily: the search never expands most nodes."""
        spec, mesh = self.space.spec, _widest(self.family)
        first, *more = checkpointings(spec, mesh.pp, self.pipeline)
        setup = _setup(self.space, mesh, self.pipeline, self.micro, first)
        return (setup, *(replace(setup, checkpointing=kind) for kind in more))

    @cached_property
    def first_seconds(self) -> float:
        """A lower bound for all setups: the first one recomputes least."""
        return _seconds(self.space, self.setups[0])

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """A lower bound per setup, for every arrangement of data-parallel ranks. Less recomputation
        is not always faster: one extra operation can cost as much as recomputing a small one."""
        more = (_seconds(self.space, setup) for setup in self.setups[1:])
        return (self.first_seconds, *more)

    @property
    def alike(self) -> tuple[PipelineSpec, bool]:
        """Nodes of a family with an equal key need more memory the larger their micro batch is. The
        key has whether gradients accumulate, which takes memory of its own."""
        return self.pipeline, self.micro_batches > 1


def search(space: Space, objective: str) -> Found:
    """The best meshes of `space`; a tie goes to the simpler mesh."""
    families, barred = _families(space)
    nodes: list[_Node] = []
    too_large: dict[Mesh, Memory] = {}
    for family in families:
        of_family = _nodes(space, family)
        large = _too_large(space, family, of_family)
        too_large |= large
        # If no mesh of the family fits, its nodes need not be bounded.
        nodes += of_family if len(large) < len(family) else []
    options = _best_first(space, objective, nodes, too_large.keys())
    slower = sum(map(len, families)) - len(too_large) - len(options)
    return Found(
        options=options,
        rejected=rejected_families(barred, too_large, slower, objective),
        least=min(too_large.values(), key=lambda memory: memory.peak_bytes, default=None),
    )


def can_fit(space: Space) -> bool:
    """Whether any mesh fits, without a search for the best."""
    families, _ = _families(space)
    return any(
        _least_if_none_fits(space, _widest(family), _smallest(_nodes(space, family))) is None
        for family in families
    )


def _families(space: Space) -> tuple[Collection[Sequence[Mesh]], Mapping[Bar, Sequence[Mesh]]]:
    """The meshes that no rule refuses, grouped by pp, cp and tp; and the refused ones, by limit."""
    barred: dict[Bar, list[Mesh]] = defaultdict(list)
    families: dict[tuple[int, ...], list[Mesh]] = defaultdict(list)
    request = space.request
    for mesh in meshes(space.spec, space.world):
        refused = first_refusal(request, mesh)
        if refused:
            rule, broken = refused
            barred[rule.axis, broken.limit].append(mesh)
        else:
            families[mesh.pp, mesh.cp, mesh.tp].append(mesh)
    return families.values(), barred


def _setup(
    space: Space, mesh: Mesh, pipeline: PipelineSpec, micro: int, kind: Checkpointing
) -> Setup:
    """Resharded the way that takes the least memory."""
    return setup_of(space.spec, space.shape, mesh, micro, kind, pipeline)


def _widest(family: Sequence[Mesh]) -> Mesh:
    """The mesh that shards most and so needs the least memory."""
    return max(family, key=lambda mesh: mesh.dp_shard)


def _nodes(space: Space, family: Sequence[Mesh]) -> list[_Node]:
    """Smaller micro batches first."""
    spec, widest = space.spec, _widest(family)
    share = spec.train.global_batch_size // widest.data_parallel
    found = []
    for pipeline in pipelines(space.request, widest):
        sizes = micro_sizes(spec, widest, pipeline)
        found += [
            _Node(space, family, pipeline, micro, share // micro, sizes[0])
            for micro in sizes
            if not _is_dominated(space, widest, pipeline, micro)
        ]
    return found


def _is_dominated(space: Space, mesh: Mesh, pipeline: PipelineSpec, micro: int) -> bool:
    """Where 1F1B can run, GPipe has the same bubble and keeps more activations."""
    # A user who asks for GPipe gets it.
    if pipeline.schedule != "gpipe" or space.spec.parallel.pipeline.schedule == "gpipe":
        return False
    # 1F1B needs at least as many micro batches as stages.
    return space.spec.train.global_batch_size // (mesh.data_parallel * micro) >= mesh.pp


def _too_large(space: Space, family: Sequence[Mesh], nodes: Sequence[_Node]) -> dict[Mesh, Memory]:
    """The meshes of a family that no setup fits, each with its smallest memory need."""
    widest, smallest = _widest(family), _smallest(nodes)
    least = _least_if_none_fits(space, widest, smallest)
    # The mesh that shards most does not fit, so no other mesh of the family does.
    if least is not None:
        return dict.fromkeys(family, least)
    found = {}
    # Among meshes that use the same axes, those that shard more need less memory, so the
    # first that fits decides for the rest.
    enough: set[tuple[bool, ...]] = set()
    for mesh in sorted(family, key=lambda mesh: mesh.dp_shard):
        axes = tuple(degree > 1 for degree in mesh.degrees)
        if mesh is widest or axes in enough:
            continue
        needed = _least_if_none_fits(space, mesh, smallest)
        if needed is None:
            enough.add(axes)
        else:
            found[mesh] = needed
    return found


def _smallest(nodes: Sequence[_Node]) -> Collection[_Node]:
    """The node with the smallest need for each `alike` key."""
    first: dict[tuple[PipelineSpec, bool], _Node] = {}
    for node in nodes:
        # Nodes are in the order of their micro batch, so the first is the smallest.
        first.setdefault(node.alike, node)
    return first.values()


def _least_if_none_fits(space: Space, mesh: Mesh, nodes: Collection[_Node]) -> Memory | None:
    """The smallest memory need of `mesh`, or None if one of `nodes` fits."""
    least: Memory | None = None
    for node in nodes:
        for widest in reversed(node.setups):
            setup = widest if mesh is widest.mesh else replace(widest, mesh=mesh)
            # The cheap lower bound shows that this setup neither fits nor is the smallest.
            if least is not None and min_peak_bytes(setup) >= max(least.peak_bytes, space.limit):
                continue
            peak = space.peak(setup)
            if space.fits(peak, node.smallest):
                return None
            memory = peak.memory()
            if least is None or memory.peak_bytes < least.peak_bytes:
                least = memory
            # Weights, gradients and moments alone are too large, so no other checkpointing helps.
            if space.is_too_large(standing_bytes(memory)):
                break
    return least


def _best_first(
    space: Space, objective: str, nodes: Sequence[_Node], too_large: Collection[Mesh]
) -> tuple[Option, ...]:
    rank = RANKS[objective]
    best: dict[Mesh, tuple[Rank, Option]] = {}
    last = math.inf
    # A node whose cheap bound is the lowest gets the next tighter bound and is queued again.
    # For memory the first bound is already the peak of a setup; a bound in seconds says nothing
    # about bytes.
    level = 1 if objective == "memory" else 0
    bounds = enumerate(_bounds(space, objective, nodes))
    waiting = [(bound, number, level) for number, bound in bounds]
    heapq.heapify(waiting)
    while waiting:
        bound, number, level = heapq.heappop(waiting)
        if bound > last:
            break
        node = nodes[number]
        if level < LEVELS:
            found = _tighter_bound(space, objective, node, level)
            # None: no setup of the node fits, so the node is dropped.
            if found is not None:
                heapq.heappush(waiting, (max(bound, found), number, level + 1))
            continue
        for mesh in node.family:
            if mesh in too_large:
                continue
            for option in _options(space, objective, node, mesh, last):
                place = rank(option)
                # Several pipelines and micro batches lead to one mesh. Only its best setup is
                # shown.
                if mesh not in best or place < best[mesh][0]:
                    best[mesh] = place, option
        # Before this many meshes are known, every node may still be among the best.
        if len(best) > SHOWN:
            last = heapq.nsmallest(SHOWN + 1, (place for place, _ in best.values()))[-1][0]
    first = heapq.nsmallest(SHOWN + 1, best.values(), key=lambda found: found[0])
    return tuple(option for _, option in first)


def _bounds(space: Space, objective: str, nodes: Sequence[_Node]) -> Iterator[float]:
    """A lower bound per node: seconds as if every setup fitted, or bytes with the smallest micro
    batch."""
    if objective != "memory":
        yield from _least_seconds(space, nodes)
        return
    least: dict[tuple[int, PipelineSpec, bool], float] = {}
    for node in nodes:
        alike = (id(node.family), *node.alike)
        # The smallest micro batch comes first and bounds all larger ones.
        if alike not in least:
            least[alike] = min(space.peak(setup).bytes for setup in node.setups)
        yield least[alike]


def _least_seconds(space: Space, nodes: Sequence[_Node]) -> Iterator[float]:
    machine = machine_of(space.fabric)
    parts: dict[tuple[int, int], Slice] = {}
    known: dict[tuple[int, int, int], LowerBound] = {}
    for node in nodes:
        mesh = node.family[0]
        cut, key = (mesh.cp, mesh.tp), (mesh.cp, mesh.tp, node.micro)
        # The cost of a slice does not depend on pp, so it is computed once for each cp and tp.
        if cut not in parts:
            parts[cut] = slice_of(node.setups[0])
        if key not in known:
            part = replace(parts[cut], sequences=node.micro)
            known[key] = lower_bound_of(machine, space.shape, part)
        stride, count = space.world // mesh.pp, node.micro_batches
        found = lower_bound_s(machine, known[key], mesh.pp, stride, node.pipeline, count)
        yield found * ROUNDING


def _tighter_bound(space: Space, objective: str, node: _Node, level: int) -> float | None:
    """Level 0: as if every setup fitted. Level 1: only setups that fit; None if none does."""
    return node.first_seconds if level == 0 else _own_bound(space, objective, node)


def _own_bound(space: Space, objective: str, node: _Node) -> float | None:
    """The bound from the setups that fit on the mesh that shards most; None if none fits."""
    if objective == "memory":
        peaks = [space.peak(setup) for setup in node.setups]
        return min((p.bytes for p in peaks if space.fits(p, node.smallest)), default=None)
    least: float | None = None
    for number, setup in enumerate(node.setups):
        if least == node.first_seconds:
            break  # no setup can be faster
        if least is not None and least <= node.seconds[number]:
            continue
        if space.is_too_large(min_peak_bytes(setup)):
            continue
        if space.fits(space.peak(setup), node.smallest):
            seconds = node.seconds[number] if number else node.first_seconds
            least = seconds if least is None else min(least, seconds)
    return least


def _seconds(space: Space, setup: Setup) -> float:
    """A lower bound for every arrangement of data-parallel ranks."""
    return passes_s(setup, machine_of(space.fabric)) * ROUNDING


def _options(
    space: Space, objective: str, node: _Node, mesh: Mesh, last: float
) -> Iterator[Option]:
    """For each way to reshard and reduce, the checkpointings that fit and may be faster than those
    before."""
    ways = product(
        reshardings(space.spec, mesh, node.pipeline),
        reductions(space.spec, mesh, node.pipeline, node.micro_batches),
    )
    for reshard, reduce in ways:
        least = math.inf if objective == "memory" else last
        for widest, seconds in zip(node.setups, node.seconds, strict=True):
            # Even its lower bound is slower than a setup that was found.
            if objective != "memory" and seconds > least:
                continue
            setup = replace(widest, mesh=mesh, reshard=reshard, reduce=reduce)
            if space.is_too_large(min_peak_bytes(setup)):
                continue
            peak = space.peak(setup)
            if space.fits(peak, node.smallest):
                option = space.option(peak)
                least = min(least, option.time.step_s)
                yield option

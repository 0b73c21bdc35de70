"""Best-first search for the best meshes, and the reason why each other mesh is not shown.

Meshes with the same pp, cp and tp differ only in data-parallel traffic and the optimizer, so they
share one lower bound (`_Node`). Nodes are expanded in the order of their bounds; a cheap bound is
replaced by a tighter one when its turn comes. For each kind of mesh (its axes in use) only the
best plan counts, so a node is skipped if all its kinds have a better plan than its bound. The
search ends when enough kinds are better than the next bound, because no other node can then be
among the best.

`tests/plan/search/test_best.py` compares it with an exhaustive search.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory, Rejected
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.train_spec import Checkpointing
from orchestrator.contract.spec.types import Auto
from orchestrator.plan.cost.layers import Slice
from orchestrator.plan.cost.lower_bound import LowerBound, lower_bound_of, lower_bound_s
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.timeline import passes_s, slice_of
from orchestrator.plan.memory.peak_memory import min_peak_bytes
from orchestrator.plan.search.admitted import (
    Kernels,
    checkpointings,
    chunkings,
    kernels,
    micro_sizes,
    pipelines,
    reductions,
    reshardings,
)
from orchestrator.plan.search.families import Bar, rejected_families
from orchestrator.plan.search.kinds import Best, Kind, kind_of, last_place, shown
from orchestrator.plan.search.meshes import meshes
from orchestrator.plan.search.rules import first_refusal
from orchestrator.plan.search.search_space import RANKS, Option, Rank, Space, standing_bytes
from orchestrator.plan.setup import Reduction, Setup, setup_of

LEVELS = 2
"""Tighter bounds after the first one."""
ROUNDING = 1 - 1e-8


class Found(Struct, frozen=True):
    options: tuple[Option, ...]
    """The chosen plan, then alternatives, the best first (`kinds.shown`); empty if nothing fits."""
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
    kernels: Kernels
    kinds: Mapping[Kind, Sequence[Mesh]] = field(default_factory=dict)
    """The meshes of the family that may fit, by kind. Set once those that do not are known."""

    @cached_property
    def setups(self) -> tuple[Setup, ...]:
        """One for each checkpointing, least recomputation first, with the mesh that shards most and
        the smallest chunks of the loss. Computed lazily: the search never expands most nodes."""
        spec, mesh = self.space.spec, _widest(self.family)
        first, *more = checkpointings(spec, mesh, self.pipeline)
        setup = replace(
            setup_of(spec, self.space.shape, mesh, self.micro, first, self.pipeline),
            compile=self.kernels.compile,
            float8=self.kernels.float8,
            loss_chunks=self.chunkings[-1],
            even_stages=self.space.fabric.profile.calibration.even_stages,
        )
        return (setup, *(replace(setup, checkpointing=kind) for kind in more))

    @cached_property
    def chunkings(self) -> tuple[int | Auto, ...]:
        tokens = self.micro * self.space.spec.data.sequence_length // self.family[0].cp
        return chunkings(self.space.spec, tokens)

    @cached_property
    def first_seconds(self) -> float:
        """A lower bound for all setups: the first one recomputes least."""
        return self._seconds(self.setups[0])

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """A lower bound per setup, for every arrangement of data-parallel ranks. Less recomputation
        is not always faster: one extra operation can cost as much as recomputing a small one."""
        more = (self._seconds(setup) for setup in self.setups[1:])
        return (self.first_seconds, *more)

    def _seconds(self, setup: Setup) -> float:
        """A lower bound for every arrangement of data-parallel ranks and all chunks of the loss."""
        fastest = replace(setup, loss_chunks=self.chunkings[0])
        return passes_s(fastest, machine_of(self.space.fabric)) * ROUNDING

    @property
    def alike(self) -> tuple[PipelineSpec, bool, Kernels]:
        """Nodes of a family with an equal key need more memory the larger their micro batch is. The
        key has whether gradients accumulate, which takes memory of its own."""
        return self.pipeline, self.micro_batches > 1, self.kernels


def search(space: Space, objective: str) -> Found:
    """The best meshes of `space`; a tie goes to the simpler mesh."""
    families, barred = _families(space)
    nodes: list[_Node] = []
    too_large: dict[Mesh, Memory] = {}
    for family in families:
        of_family = _nodes(space, family)
        large = _too_large(space, family, of_family)
        too_large |= large
        kinds = _by_kind(space, (mesh for mesh in family if mesh not in large))
        # If no mesh of the family fits, its nodes need not be bounded.
        for node in of_family if kinds else ():
            node.kinds = kinds
            nodes.append(node)
    margin = 0.0 if objective == "memory" else space.margin
    best = _best_first(space, objective, nodes, partial(last_place, margin=margin))
    options = shown(space, best, margin)
    slower = sum(map(len, families)) - len(too_large) - len(options)
    return Found(
        options=options,
        rejected=rejected_families(barred, too_large, space.limit, slower, objective),
        least=min(too_large.values(), key=lambda memory: memory.peak_bytes, default=None),
    )


def fastest(space: Space, limit: float) -> Option | None:
    """The fastest plan that takes less than `limit` seconds a step, or None."""
    families, _ = _families(space)
    nodes: list[_Node] = []
    for family in families:
        kinds = _by_kind(space, family)
        for node in _nodes(space, family):
            node.kinds = kinds
            nodes.append(node)
    found = _best_first(space, "throughput", nodes, _first_place, limit)
    return found[0] if found else None


def _first_place(best: Best) -> float:
    return min((place[0] for place, _ in best.values()), default=math.inf)


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


def _by_kind(space: Space, family: Iterable[Mesh]) -> Mapping[Kind, Sequence[Mesh]]:
    kinds: dict[Kind, list[Mesh]] = defaultdict(list)
    for mesh in family:
        kinds[kind_of(mesh, space.fabric.devices_per_host)].append(mesh)
    return kinds


def _widest(family: Sequence[Mesh]) -> Mesh:
    """The mesh that shards most and so needs the least memory."""
    return max(family, key=lambda mesh: mesh.dp_shard)


def _nodes(space: Space, family: Sequence[Mesh]) -> list[_Node]:
    """Smaller micro batches first."""
    spec, widest = space.spec, _widest(family)
    share = spec.train.global_batch_size // widest.data_parallel
    found = []
    for pipeline in pipelines(space.request, widest):
        ways = kernels(spec, space.shape, space.fabric.profile, widest, pipeline)
        sizes = micro_sizes(spec, widest, pipeline)
        found += [
            _Node(space, family, pipeline, micro, share // micro, sizes[0], way)
            for micro in sizes
            if not _is_dominated(space, widest, pipeline, micro)
            for way in ways
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
    first: dict[tuple[PipelineSpec, bool, Kernels], _Node] = {}
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
    space: Space,
    objective: str,
    nodes: Sequence[_Node],
    last_of: Callable[[Best], float],
    last: float = math.inf,
) -> list[Option]:
    """The best option of each kind of mesh, the best first. Nothing above `last` seconds or bytes
    is searched, and nothing above what `last_of` returns for the best options so far."""
    rank = RANKS[objective]
    best: dict[Kind, tuple[Rank, Option]] = {}
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
        # What a plan must reach to be the best of its kind; all kinds of the node are known.
        reach = {kind: best[kind][0][0] if kind in best else math.inf for kind in node.kinds}
        if bound > max(reach.values()):
            continue
        if level < LEVELS:
            found = _tighter_bound(space, objective, node, level)
            # None: no setup of the node fits, so the node is dropped.
            if found is not None:
                heapq.heappush(waiting, (max(bound, found), number, level + 1))
            continue
        for kind, some in node.kinds.items():
            for mesh in some:
                most = min(last, best[kind][0][0]) if kind in best else last
                for option in _options(space, objective, node, mesh, most):
                    place = rank(option)
                    if place[0] <= last and (kind not in best or place < best[kind][0]):
                        best[kind] = place, option
        last = min(last, last_of(best))
    return [option for _, option in sorted(best.values(), key=itemgetter(0))]


def _bounds(space: Space, objective: str, nodes: Sequence[_Node]) -> Iterator[float]:
    """A lower bound per node: seconds as if every setup fitted, or bytes with the smallest micro
    batch."""
    if objective != "memory":
        yield from _least_seconds(space, nodes)
        return
    least: dict[tuple[int, PipelineSpec, bool, Kernels], float] = {}
    for node in nodes:
        alike = (id(node.family), *node.alike)
        # The smallest micro batch comes first and bounds all larger ones.
        if alike not in least:
            least[alike] = min(space.peak(setup).bytes for setup in node.setups)
        yield least[alike]


def _least_seconds(space: Space, nodes: Sequence[_Node]) -> Iterator[float]:
    machine = machine_of(space.fabric)
    parts: dict[tuple[int, int, Kernels], Slice] = {}
    known: dict[tuple[int, int, int, Kernels], LowerBound] = {}
    for node in nodes:
        mesh = node.family[0]
        cut = (mesh.cp, mesh.tp, node.kernels)
        key = (mesh.cp, mesh.tp, node.micro, node.kernels)
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


def _options(
    space: Space, objective: str, node: _Node, mesh: Mesh, most: float
) -> Iterator[Option]:
    """For each way to reshard and reduce, the checkpointings and chunks of the loss that fit and
    may be faster than those before."""
    timed = objective != "memory"
    ways = product(
        reshardings(space.spec, mesh, node.pipeline),
        reductions(space.spec, mesh, node.pipeline, node.micro_batches),
    )
    slow: set[tuple[Reduction, Checkpointing]] = set()
    for reshard, reduce in ways:
        least = most if timed else math.inf
        for widest, seconds in zip(node.setups, node.seconds, strict=True):
            # Even its lower bound is slower than a setup that was found. Or it was too slow with
            # fewer gathers, which `reshardings` lists first.
            if timed and (seconds > least or (reduce, widest.checkpointing) in slow):
                continue
            setup = replace(widest, mesh=mesh, reshard=reshard, reduce=reduce)
            if space.is_too_large(min_peak_bytes(setup)):
                continue
            fastest = replace(setup, loss_chunks=node.chunkings[0])
            if timed and space.seconds(fastest) * ROUNDING > most:
                slow.add((reduce, widest.checkpointing))
                continue
            for option in _chunked(space, node, setup, most if timed else None):
                least = min(least, option.time.step_s)
                yield option


def _chunked(space: Space, node: _Node, setup: Setup, most: float | None) -> Iterator[Option]:
    """`setup` with the chunks of the loss with which it fits. `most`: seconds of a step above which
    a setup is not wanted, and only the fastest is; None: all are."""
    for chunks in node.chunkings:
        chunked = replace(setup, loss_chunks=chunks)
        # Memory takes longer to compute than the time, which already rules it out.
        if most is not None and space.seconds(chunked) * ROUNDING > most:
            return
        peak = space.peak(chunked)
        if not space.fits(peak, node.smallest):
            continue
        yield space.option(peak)
        # The first chunks are the fastest, so others are needed only for less memory.
        if most is not None and chunks == node.chunkings[0]:
            return

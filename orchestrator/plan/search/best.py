"""The best meshes of a space, each as it runs best, and what rules out the others.

Best first, by lower bounds. What a setup takes does not hang on how its data-parallel ranks are
arranged but for what these send each other and for the optimizer, so one bound stands for all
arrangements (`_Node`). Nodes are looked into in the order of their bounds, and once enough meshes
are better than the next bound, nothing that is left can be among them.

`tests/plan/search/test_best.py` compares it with `every_option`, which leaves nothing out.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.parallel import PipelineSpec
from orchestrator.contract.plan import Memory, Rejected
from orchestrator.plan.cost.machine import machine_of
from orchestrator.plan.cost.timeline import timeline
from orchestrator.plan.search.constraints import (
    Barrier,
    barrier,
    checkpointings,
    micro_sizes,
    pipelines,
    reshardings,
)
from orchestrator.plan.search.degrees import meshes
from orchestrator.plan.search.families import rejected_families
from orchestrator.plan.search.space import RANKS, Option, Space, standing_bytes
from orchestrator.plan.setup import Checkpointing, Setup, setup_of

SHOWN = 5
"""Alternatives to the best."""
INNER_AXES = frozenset({"pp", "cp", "tp"})
INNER_PARTS = ("compute", "recompute", "host", "bubble")
SHARED = frozenset({"weights", "gradients"})
"""What goes between ranks that share weights, whatever the axis is called."""
ROUNDING = 1 - 1e-8


@dataclass(frozen=True, slots=True)
class Found:
    options: tuple[Option, ...]
    """The best mesh and up to `SHOWN` others, each as it runs best; the best first. None where
    nothing fits."""
    rejected: tuple[Rejected, ...]
    least: Memory | None
    """The least that a mesh needs of those that are too large."""


@dataclass(frozen=True, slots=True)
class _Node:
    """One way to run each mesh of a family: those with the same pp, cp and tp."""

    setups: tuple[Setup, ...]
    """With the mesh that shards most: one for each checkpointing, the quickest first."""
    smallest: int
    """Micro batch that there is for its pipeline."""
    family: Sequence[Mesh]

    @property
    def alike(self) -> tuple[PipelineSpec, bool]:
        """Nodes of a family with the same need more memory, the larger their micro batch is. One
        micro batch a step leaves no gradients to add up."""
        return self.setups[0].pipeline, self.setups[0].micro_batches > 1


def search(space: Space, objective: str) -> Found:
    """The best of `space`; ties go to the simpler mesh."""
    barred: dict[Barrier, list[Mesh]] = defaultdict(list)
    families: dict[tuple[int, ...], list[Mesh]] = defaultdict(list)
    for mesh in meshes(space.spec, space.world):
        found = barrier(space.spec, space.shape, mesh)
        if found:
            barred[found].append(mesh)
        else:
            families[mesh.pp, mesh.cp, mesh.tp].append(mesh)
    nodes: list[_Node] = []
    too_large: dict[Mesh, Memory] = {}
    for family in families.values():
        of_family = _nodes(space, family)
        large = _too_large(space, family, of_family)
        too_large |= large
        nodes += of_family if len(large) < len(family) else []
    options = _best_first(space, objective, nodes, too_large.keys())
    slower = sum(map(len, families.values())) - len(too_large) - len(options)
    return Found(
        options=options,
        rejected=rejected_families(barred, too_large, slower, objective),
        least=min(too_large.values(), key=lambda memory: memory.peak_bytes, default=None),
    )


def can_fit(space: Space) -> bool:
    """Whether there is any plan."""
    families: dict[tuple[int, ...], list[Mesh]] = defaultdict(list)
    for mesh in meshes(space.spec, space.world):
        if barrier(space.spec, space.shape, mesh) is None:
            families[mesh.pp, mesh.cp, mesh.tp].append(mesh)
    return any(
        _least_if_none_fits(space, _widest(family), _nodes(space, family)) is None
        for family in families.values()
    )


def every_option(space: Space) -> Iterator[Option]:
    """All that fits, one by one: what `search` finds the best of, in a time that small worlds
    alone allow."""
    spec, shape = space.spec, space.shape
    for mesh in meshes(spec, space.world):
        if barrier(spec, shape, mesh):
            continue
        for pipeline in pipelines(spec, shape, mesh.pp):
            sizes = micro_sizes(spec, mesh, pipeline)
            for micro in sizes:
                for kind in checkpointings(spec, mesh.pp, pipeline):
                    for reshard in reshardings(spec, mesh, pipeline):
                        setup = _setup(space, mesh, pipeline, micro, kind)
                        setup = replace(setup, reshard=reshard)
                        memory = space.memory(setup)
                        if space.fits(setup, memory, sizes[0]):
                            yield space.option(setup, memory)


def _setup(
    space: Space, mesh: Mesh, pipeline: PipelineSpec, micro: int, kind: Checkpointing
) -> Setup:
    """Resharded in the way that takes least memory."""
    setup = setup_of(space.spec, space.shape, mesh, micro, kind)
    return replace(setup, pipeline=pipeline, reshard=reshardings(space.spec, mesh, pipeline)[-1])


def _widest(family: Sequence[Mesh]) -> Mesh:
    """The mesh that shards most, and so needs the least memory."""
    return max(family, key=lambda mesh: mesh.dp_shard)


def _nodes(space: Space, family: Sequence[Mesh]) -> list[_Node]:
    """Smaller micro batches first."""
    spec, widest = space.spec, _widest(family)
    found = []
    for pipeline in pipelines(spec, space.shape, widest.pp):
        sizes = micro_sizes(spec, widest, pipeline)
        kinds = checkpointings(spec, widest.pp, pipeline)
        for micro in sizes:
            if not _is_dominated(space, widest, pipeline, micro):
                first = _setup(space, widest, pipeline, micro, kinds[0])
                setups = (first, *(replace(first, checkpointing=kind) for kind in kinds[1:]))
                found.append(_Node(setups, sizes[0], family))
    return found


def _is_dominated(space: Space, mesh: Mesh, pipeline: PipelineSpec, micro: int) -> bool:
    """GPipe waits as long as 1F1B and keeps more, where 1F1B can do it."""
    if pipeline.schedule != "gpipe" or space.spec.parallel.pipeline.schedule == "gpipe":
        return False
    return space.spec.train.global_batch_size // (mesh.data_parallel * micro) >= mesh.pp


def _too_large(space: Space, family: Sequence[Mesh], nodes: Sequence[_Node]) -> dict[Mesh, Memory]:
    """The meshes of a family that nothing makes fit, each with the least that it needs."""
    widest = _widest(family)
    least = _least_if_none_fits(space, widest, nodes)
    if least is not None:
        return dict.fromkeys(family, least)
    found = {}
    for mesh in family:
        needed = None if mesh is widest else _least_if_none_fits(space, mesh, nodes)
        if needed is not None:
            found[mesh] = needed
    return found


def _least_if_none_fits(space: Space, mesh: Mesh, nodes: Sequence[_Node]) -> Memory | None:
    """None where something fits. Of nodes that are alike the first needs the least."""
    needed: list[Memory] = []
    first = {node.alike: node for node in reversed(nodes)}
    for node in first.values():
        for setup in reversed(node.setups):
            memory = space.memory(_on(space, mesh, setup))
            if space.fits(setup, memory, node.smallest):
                return None
            needed.append(memory)
            if space.is_too_large(standing_bytes(memory)):
                break
    return min(needed, key=lambda memory: memory.peak_bytes)


def _on(space: Space, mesh: Mesh, setup: Setup) -> Setup:
    """With another arrangement of the data-parallel ranks."""
    reshard = reshardings(space.spec, mesh, setup.pipeline)[-1]
    return replace(setup, mesh=mesh, reshard=reshard)


def _best_first(
    space: Space, objective: str, nodes: Sequence[_Node], too_large: Collection[Mesh]
) -> tuple[Option, ...]:
    rank = RANKS[objective]
    best: dict[Mesh, Option] = {}
    # A bound that costs little first; who comes up with it gets one of his own, and waits again.
    waiting = [
        (bound, number, False) for number, bound in enumerate(_bounds(space, objective, nodes))
    ]
    heapq.heapify(waiting)
    while waiting:
        bound, number, is_own = heapq.heappop(waiting)
        if len(best) > SHOWN:
            last = heapq.nsmallest(SHOWN + 1, (rank(option) for option in best.values()))[-1]
            if bound > last[0]:
                break
        node = nodes[number]
        if not is_own:
            own = _own_bound(space, objective, node)
            if own is not None:
                heapq.heappush(waiting, (max(bound, own), number, True))
            continue
        for mesh in node.family:
            if mesh in too_large:
                continue
            for option in _options(space, objective, node, mesh):
                if mesh not in best or rank(option) < rank(best[mesh]):
                    best[mesh] = option
    return tuple(heapq.nsmallest(SHOWN + 1, best.values(), key=rank))


def _bounds(space: Space, objective: str, nodes: Sequence[_Node]) -> Iterator[float]:
    """Below what any setup of each node takes: seconds as if all of it fitted, or the bytes of the
    smallest micro batch."""
    least: dict[tuple[int, PipelineSpec, bool], float] = {}
    for node in nodes:
        if objective != "memory":
            yield _seconds(space, node.setups[0])
            continue
        alike = (id(node.family), *node.alike)
        if alike not in least:
            least[alike] = min(space.memory(setup).peak_bytes for setup in node.setups)
        yield least[alike]


def _own_bound(space: Space, objective: str, node: _Node) -> float | None:
    """With what fits on the mesh that shards most; None where nothing does."""
    sizes = []
    for setup in node.setups:
        memory = space.memory(setup)
        if space.fits(setup, memory, node.smallest):
            if objective != "memory":
                return _seconds(space, setup)
            sizes.append(memory.peak_bytes)
    return min(sizes, default=None)


def _seconds(space: Space, setup: Setup) -> float:
    """Below all arrangements of the data-parallel ranks."""
    found = timeline(setup, machine_of(space.fabric))
    seconds = sum(found.parts.get(part, 0.0) for part in INNER_PARTS)
    talk = sum(
        flow.exposed for flow in found.flows if flow.axis in INNER_AXES and flow.what not in SHARED
    )
    return (seconds + min(talk, found.parts.get("communication", 0.0))) * ROUNDING


def _options(space: Space, objective: str, node: _Node, mesh: Mesh) -> Iterator[Option]:
    """With each way to reshard, the least checkpointing that fits: more takes longer."""
    pipeline = node.setups[0].pipeline
    for reshard in reshardings(space.spec, mesh, pipeline):
        for widest in node.setups:
            setup = replace(widest, mesh=mesh, reshard=reshard)
            memory = space.memory(setup)
            if space.fits(setup, memory, node.smallest):
                yield space.option(setup, memory)
                if objective != "memory" and setup.checkpointing != "every_k":
                    break

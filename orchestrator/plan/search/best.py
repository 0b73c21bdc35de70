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

    bound: float
    """No setup of it comes below, in seconds or in bytes."""
    setup: Setup
    """With the mesh that shards most."""
    kinds: tuple[Checkpointing, ...]
    """That may fit."""
    smallest: int
    """Micro batch that there is for its pipeline."""
    family: Sequence[Mesh]


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
        of_family, least = _nodes(space, objective, family)
        nodes += of_family
        too_large |= _too_large(space, family, of_family, least)
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
    return any(_nodes(space, "throughput", family)[0] for family in families.values())


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


def _nodes(
    space: Space, objective: str, family: Sequence[Mesh]
) -> tuple[list[_Node], Memory | None]:
    """Those that may fit; and the least that is needed where none does."""
    spec = space.spec
    widest = max(family, key=lambda mesh: mesh.dp_shard)
    found: list[_Node] = []
    too_large: list[Memory] = []
    for pipeline in pipelines(spec, space.shape, widest.pp):
        sizes = micro_sizes(spec, widest, pipeline)
        for micro in sizes:
            if _is_dominated(space, widest, pipeline, micro):
                continue
            kinds = checkpointings(spec, widest.pp, pipeline)
            tried = [_setup(space, widest, pipeline, micro, kind) for kind in kinds]
            for number, setup in enumerate(tried):
                memory = space.memory(setup)
                if space.fits(setup, memory, sizes[0]):
                    bound = _bound(space, objective, tried[number:])
                    found.append(_Node(bound, setup, kinds[number:], sizes[0], family))
                    break
                too_large.append(memory)
                if space.is_too_large(standing_bytes(memory)):
                    break
    least = min(too_large, key=lambda memory: memory.peak_bytes, default=None)
    return found, None if found else least


def _is_dominated(space: Space, mesh: Mesh, pipeline: PipelineSpec, micro: int) -> bool:
    """GPipe waits as long as 1F1B and keeps more, where 1F1B can do it."""
    if pipeline.schedule != "gpipe" or space.spec.parallel.pipeline.schedule == "gpipe":
        return False
    return space.spec.train.global_batch_size // (mesh.data_parallel * micro) >= mesh.pp


def _bound(space: Space, objective: str, setups: Sequence[Setup]) -> float:
    """Below all arrangements, for setups that differ in checkpointing, the quickest first."""
    if objective == "memory":
        return min(space.memory(setup).peak_bytes for setup in setups)
    found = timeline(setups[0], machine_of(space.fabric))
    seconds = sum(found.parts.get(part, 0.0) for part in INNER_PARTS)
    talk = sum(
        flow.exposed for flow in found.flows if flow.axis in INNER_AXES and flow.what not in SHARED
    )
    return (seconds + min(talk, found.parts.get("communication", 0.0))) * ROUNDING


def _too_large(
    space: Space, family: Sequence[Mesh], nodes: Sequence[_Node], least: Memory | None
) -> dict[Mesh, Memory]:
    """The meshes of a family that nothing makes fit, each with the least that it needs."""
    if least is not None:
        return dict.fromkeys(family, least)
    found = {}
    for mesh in family:
        needed = _least_if_none_fits(space, mesh, nodes)
        if needed is not None:
            found[mesh] = needed
    return found


def _least_if_none_fits(space: Space, mesh: Mesh, nodes: Sequence[_Node]) -> Memory | None:
    needed: list[Memory] = []
    hopeless: set[tuple[PipelineSpec, bool]] = set()
    for node in nodes:
        alike = (node.setup.pipeline, node.setup.micro_batches > 1)
        for kind in reversed(node.kinds):
            if alike in hopeless:
                break
            setup = _setup(space, mesh, node.setup.pipeline, node.setup.micro_batch_size, kind)
            memory = space.memory(setup)
            if space.fits(setup, memory, node.smallest):
                return None
            needed.append(memory)
            if space.is_too_large(standing_bytes(memory)):
                hopeless.add(alike)
    return min(needed, key=lambda memory: memory.peak_bytes)


def _best_first(
    space: Space, objective: str, nodes: Sequence[_Node], too_large: Collection[Mesh]
) -> tuple[Option, ...]:
    rank = RANKS[objective]
    best: dict[Mesh, Option] = {}
    for node in sorted(nodes, key=lambda node: node.bound):
        if len(best) > SHOWN:
            last = heapq.nsmallest(SHOWN + 1, (rank(option) for option in best.values()))[-1]
            if node.bound > last[0]:
                break
        for mesh in node.family:
            if mesh in too_large:
                continue
            for option in _options(space, objective, node, mesh):
                if mesh not in best or rank(option) < rank(best[mesh]):
                    best[mesh] = option
    return tuple(heapq.nsmallest(SHOWN + 1, best.values(), key=rank))


def _options(space: Space, objective: str, node: _Node, mesh: Mesh) -> Iterator[Option]:
    """With each way to reshard, the least checkpointing that fits: more takes longer."""
    pipeline, micro = node.setup.pipeline, node.setup.micro_batch_size
    for reshard in reshardings(space.spec, mesh, pipeline):
        for kind in node.kinds:
            setup = replace(_setup(space, mesh, pipeline, micro, kind), reshard=reshard)
            memory = space.memory(setup)
            if space.fits(setup, memory, node.smallest):
                yield space.option(setup, memory)
                if objective != "memory" and kind != "every_k":
                    break

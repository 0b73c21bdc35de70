"""Peak memory of the rank that needs most, by item.

peak = parameters + optimizer + pipeline buffers + max(gradients, highest usage in a step) + reserve

`states.py`, `activations.py`, `timeline.py` and `reserve.py` have the terms and their sources.
`docs/planner_model.md` has their accuracy.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from orchestrator.contract.plan import IN_MEMORY, Memory
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.memory.activations import layer_of
from orchestrator.plan.memory.peak_range import basis_of, fits_share, peak_range
from orchestrator.plan.memory.reserve import reserve_bytes
from orchestrator.plan.memory.states import (
    MASTER_BYTES,
    States,
    states_of,
    units_of,
    update_bytes,
)
from orchestrator.plan.memory.timeline import Point, Usage, points_of
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import Setup
from orchestrator.plan.sizes import COMPUTE_BYTES
from orchestrator.plan.stages import StageRank, stage_ranks


class _Rank(NamedTuple):
    """One rank along pp, at its peak."""

    number: int
    states: States
    boundaries: int
    points: list[Point]
    peak: int


class Peak(NamedTuple):
    """Of the fullest rank. `memory()` computes the items, which a search needs for few setups."""

    setup: Setup
    fabric: Fabric | None
    rank: _Rank
    reserve: Mapping[str, int]
    bytes: int

    def memory(self) -> Memory:
        setup, fabric, rank = self.setup, self.fabric, self.rank
        return Memory(
            peak_bytes=self.bytes,
            device_bytes=fabric.profile.memory_bytes if fabric else None,
            worst_rank=f"pp stage {rank.number}" if setup.mesh.pp > 1 else "every rank",
            items={**_items(rank), **self.reserve},
            peak_bytes_range=peak_range(setup, rank.peak, self.reserve),
            basis=basis_of(setup),
            fits=fits_share(rank.peak, self.reserve, fabric.profile.memory_bytes)
            if fabric
            else None,
            host=_host(setup, rank.states),
        )


def peak_of(setup: Setup, fabric: Fabric | None) -> Peak:
    """The peak of the fullest rank of `setup`, on devices of `fabric`."""
    ranks = _largest_ranks(_pipeline(setup))
    worst = max([_rank(setup, n, rank) for n, rank in ranks.items()], key=_fullness)
    return _peak(setup, worst, fabric)


def memory_of(setup: Setup, fabric: Fabric | None) -> Memory:
    """The peak by item."""
    return peak_of(setup, fabric).memory()


def memories_of(setup: Setup, fabric: Fabric | None) -> tuple[Memory, ...]:
    """The peak by item, for every rank along pp."""
    ranks = ranks_of(setup)
    return tuple(
        _peak(setup, _rank(setup, n, rank), fabric).memory() for n, rank in enumerate(ranks)
    )


def _fullness(rank: _Rank) -> int:
    return rank.peak


def _peak(setup: Setup, rank: _Rank, fabric: Fabric | None) -> Peak:
    reserve = reserve_bytes(setup.mesh, rank.peak, fabric)
    return Peak(setup, fabric, rank, reserve, rank.peak + sum(reserve.values()))


def min_peak_bytes(setup: Setup) -> int:
    """A fast lower bound of `peak_of`: weights, moments and kept activations of the first pipeline
    rank after the last forward pass."""
    mesh = setup.mesh
    rank = _first(_pipeline(setup))
    states = states_of(setup, rank, units_of(setup, rank))
    kept = 0.0
    if setup.checkpointing != "every_k":
        tokens = setup.micro_batch_size * math.ceil(setup.tokens / mesh.cp)
        kept = (rank.kept * rank.layers - 1) * layer_of(setup).kept * tokens
    return states.parameters + states.optimizer + int(max(0.0, kept))


def ranks_of(setup: Setup) -> tuple[StageRank, ...]:
    """All ranks along pp."""
    return stage_ranks(*_pipeline(setup))


class _Pipeline(NamedTuple):
    """The arguments of `stage_ranks`."""

    shape: ModelShape
    pp: int
    spec: PipelineSpec
    micro_batches: int
    tokens: int
    even: bool


def _pipeline(setup: Setup) -> _Pipeline:
    pp, spec = setup.mesh.pp, setup.pipeline
    return _Pipeline(setup.shape, pp, spec, setup.micro_batches, setup.tokens, setup.even_stages)


@cache
def _first(pipeline: _Pipeline) -> StageRank:
    return stage_ranks(*pipeline)[0]


@cache
def _largest_ranks(pipeline: _Pipeline) -> Mapping[int, StageRank]:
    """The ranks that may need most: no other rank has at least as much of everything. Cached,
    because a search asks again for each arrangement of data-parallel ranks."""
    largest: dict[int, StageRank] = {}
    for number, rank in enumerate(stage_ranks(*pipeline)):
        if not any(_covers(other, rank) for other in largest.values()):
            largest[number] = rank
    return largest


def _covers(one: StageRank, other: StageRank) -> bool:
    return (
        one.layers >= other.layers
        and one.layers - one.dense_layers >= other.layers - other.dense_layers
        and one.kept >= other.kept
        and one.is_first >= other.is_first
        and one.is_last >= other.is_last
        and sum(one.split) >= sum(other.split)
        and max(one.split, default=0) >= max(other.split, default=0)
    )


def _rank(setup: Setup, number: int, rank: StageRank) -> _Rank:
    units = units_of(setup, rank)
    states = states_of(setup, rank, units)
    boundaries, points = boundary_bytes(setup, rank), points_of(setup, rank, units, states)
    kept = states.parameters + states.optimizer + boundaries
    update = 0 if states.host else states.gradients + update_bytes(setup, states)
    peak = kept + max(update, math.ceil(max([sum(point.usage) for point in points])))
    return _Rank(number, states, boundaries, points, peak)


def _items(rank: _Rank) -> dict[str, int]:
    """The peak of each item in the step; the items do not peak together."""
    states = rank.states
    most = Usage(*map(max, zip(*(point.usage for point in rank.points), strict=True)))
    items = {
        "parameters": states.parameters,
        "gradients": max(states.gradients, math.ceil(most.gradients)),
        "optimizer": states.optimizer,
        "gathered": math.ceil(most.gathered),
        "activations": math.ceil(most.activations),
        "logits": math.ceil(most.logits),
        "temporary": math.ceil(most.temporary),
    }
    return items | ({"boundaries": rank.boundaries} if rank.boundaries else {})


def _host(setup: Setup, states: States) -> dict[str, int]:
    """Bytes in host memory per rank: offloaded states, and the copy that an asynchronous checkpoint
    is written from, and the other slots of checkpoints in memory; that copy is one of them."""
    moved = states.host
    saved = moved or {"parameters": states.parameters, "optimizer": states.optimizer}
    frozen = 0
    if setup.lora is not None:
        # A checkpoint of a LoRA job holds only the adapters.
        frozen = saved["parameters"] - MASTER_BYTES * states.trained.shard
    checkpoint = saved["parameters"] - frozen + saved["optimizer"]
    others = setup.host_slots - 1
    slots = {IN_MEMORY: others * checkpoint} if others > 0 else {}
    return {**moved, "checkpoint": checkpoint, **slots}


def boundary_bytes(setup: Setup, rank: StageRank) -> int:
    """Bytes of the buffers between pipeline stages; 0 without a pipeline.

    For each micro batch of a step torch allocates buffers for the hidden states that a stage
    receives and for the gradients that come back (`PipelineStage`, `_RecvInfo`). A stage keeps its
    output until the backward pass of that micro batch.
    """
    shape, mesh = setup.shape, setup.mesh
    if mesh.pp == 1:
        return 0
    stages = setup.pipeline.stages
    arrive = 2 * stages - rank.is_first - rank.is_last
    tensors = arrive * setup.micro_batches + rank.kept * stages
    width = math.ceil(shape.hidden_size / mesh.tp) * COMPUTE_BYTES[setup.dtype]
    tokens = setup.micro_batch_size * math.ceil(setup.tokens / mesh.cp)
    return math.ceil(tensors * tokens * width)

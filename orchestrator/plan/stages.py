"""Pipelines: the layers of each rank, the activations it keeps, and the bubble."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import islice, pairwise

from msgspec import Struct

from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import (
    BACK_AND_FORTH,
    SPLITS_BACKWARD,
    cut,
    demand,
    layer_costs,
    rank_of_stage,
    stages_of_rank,
)
from orchestrator.plan.model.shape import ModelShape

STAGES_AT_ONCE = 3
"""Stages of a rank that torch's schedules keep gathered at the same time
(`_add_unshard_reshard`)."""


class StageLayers(Struct, frozen=True, kw_only=True):
    """The layers of one rank along pp."""

    stages: tuple[int, ...]
    """Layers of each of its stages."""
    layers: int
    """Layers of all its stages."""
    dense_layers: int
    """Those without experts, of a model that has experts in others."""
    is_first: bool
    is_last: bool


class StageRank(Struct, frozen=True, kw_only=True):
    """The layers of a rank, and how many activations it keeps."""

    layers: int
    is_first: bool
    is_last: bool
    kept: float
    """Largest number of micro batches whose activations the rank stores at the same time."""
    split: tuple[int, ...] = ()
    """Layers of each stage whose backward pass is split in two. The first stage of the pipeline has
    no gradient of an input to compute first, so its backward pass is whole."""
    dense_layers: int = 0
    """As in `StageLayers`."""


def stage_ranks(
    shape: ModelShape,
    pp: int,
    spec: PipelineSpec,
    micro_batches: int,
    tokens: int,
    even: bool = False,
) -> tuple[StageRank, ...]:
    """All ranks along pp; `tokens` is the sequence length, `even` is `Setup.even_stages`."""
    return tuple(
        StageRank(
            layers=held.layers,
            dense_layers=held.dense_layers,
            is_first=held.is_first,
            is_last=held.is_last,
            kept=_kept(held, pp, spec, rank, micro_batches),
            split=held.stages[held.is_first :]
            if pp > 1 and spec.schedule == SPLITS_BACKWARD
            else (),
        )
        for rank, held in enumerate(layers_along_pp(shape, pp, spec, tokens, even))
    )


def _kept(held: StageLayers, pp: int, spec: PipelineSpec, rank: int, micro_batches: int) -> float:
    if pp == 1:
        return 1  # the backward pass of a micro batch comes before the next forward pass
    if spec.schedule == BACK_AND_FORTH:
        return _kept_layers(pp, rank, micro_batches, *held.stages) / held.layers
    return kept_passes(spec, pp, rank, micro_batches) / spec.stages


@cache
def layers_along_pp(
    shape: ModelShape, pp: int, spec: PipelineSpec, tokens: int, even: bool = False
) -> tuple[StageLayers, ...]:
    """The layers of each rank along pp; `even` is `Setup.even_stages`.

    Rule `pp-layers` refuses more stages than layers. Here each stage then counts as one layer.
    """
    if pp == 1:
        return (_held(shape, [(0, shape.num_layers)], is_first=True, is_last=True),)
    stages = pp * spec.stages
    cuts = _even_cuts(shape, stages) if even else stage_cuts(shape, stages, tokens)
    last = 0 if spec.schedule == BACK_AND_FORTH else pp - 1
    found = []
    for rank in range(pp):
        own = [cuts[stage] for stage in stages_of_rank(spec, pp, rank)]
        found.append(_held(shape, own, is_first=rank == 0, is_last=rank == last))
    return tuple(found)


def _held(
    shape: ModelShape, own: Sequence[tuple[int, int]], *, is_first: bool, is_last: bool
) -> StageLayers:
    """The layers of a rank whose stages are from first to stop layer in `own`."""
    sizes = tuple(stop - start for start, stop in own)
    dense = sum(start <= layer < stop for layer in shape.dense_layers for start, stop in own)
    return StageLayers(
        stages=sizes,
        layers=sum(sizes),
        dense_layers=dense,
        is_first=is_first,
        is_last=is_last,
    )


def _kept_layers(pp: int, rank: int, micro_batches: int, down: int, up: int) -> int:
    """Layers of `rank` with stored activations in ZBV, at the end of the warm-up.

    As in torch's `ScheduleZBVZeroBubble`: the second arm of the V has then run `rank` + 1 micro
    batches.
    """
    first_arm = min(micro_batches, 2 * pp - 1 - rank)
    return first_arm * down + min(micro_batches, rank + 1) * up


@cache
def stage_cuts(shape: ModelShape, num_stages: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """First layer and stop layer of each stage, as in the trainer."""
    costs = layer_costs(
        num_layers=max(shape.num_layers, num_stages),
        layer_matrices=shape.layer_matrices,
        query_size=(shape.query_size + shape.result_size) // 2,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tokens=tokens,
    )
    return tuple(cut(costs, num_stages))


def _even_cuts(shape: ModelShape, num_stages: int) -> list[tuple[int, int]]:
    """As many layers in each stage, or one more in the first ones."""
    size, more = divmod(max(shape.num_layers, num_stages), num_stages)
    stops = [stage * size + min(stage, more) for stage in range(num_stages + 1)]
    return list(pairwise(stops))


def kept_passes(spec: PipelineSpec, pp: int, rank: int, micro_batches: int) -> int:
    """Largest number of forward passes of `rank`, per stage, whose backward pass is still to come.

    GPipe: all (Huang et al. 2019, section 2.3). 1F1B: one for this and each following rank
    (Narayanan et al. 2019, PipeDream-Flush). Interleaved 1F1B: the warm-up runs a round of all
    stages but the last, and two more for each following rank (Narayanan et al. 2021, section 2.2;
    torch's `_get_warmup_ops`). ZBV: each rank stores as much as the first rank of 1F1B (Qi et al.
    2024, "Pipeline Parallelism with Controllable Memory", section 4).
    """
    most = micro_batches * spec.stages
    match spec.schedule:
        case "gpipe":
            return most
        case "1f1b" | "auto":
            return min(most, pp - rank)
        case "interleaved_1f1b":
            return min(
                most, (spec.stages - 1) * _round(pp, micro_batches) + 2 * (pp - 1 - rank) + 1
            )
        case "zbv":
            return min(most, 2 * pp)


@cache
def stage_gathers(
    spec: PipelineSpec, pp: int, rank: int, micro_batches: int
) -> tuple[tuple[int, ...], ...]:
    """For each stage of `rank` and each of its gathers: the number of passes through other stages
    between the start of the gather and its first use.

    torch's schedules gather a whole stage before its first pass, and free it if it is not among the
    next three stages that the rank needs (`_add_unshard_reshard`).
    """
    if spec.stages <= STAGES_AT_ONCE:
        return tuple((stage,) for stage in range(spec.stages))
    passes = list(_interleaved_passes(spec, pp, rank, micro_batches))
    gathered: list[list[int]] = [[] for _ in range(spec.stages)]
    current: Collection[int] = ()
    for at in range(len(passes)):
        needed = _next_stages(passes, at)
        for stage, ahead in needed.items():
            if stage not in current:
                gathered[stage].append(ahead)
        current = needed
    return tuple(map(tuple, gathered))


def _interleaved_passes(
    spec: PipelineSpec, pp: int, rank: int, micro_batches: int
) -> Iterator[int]:
    """The stages of the forward and backward passes of `rank`, in the order of the schedule."""
    stages, total = spec.stages, micro_batches * spec.stages
    a_round = _round(pp, micro_batches)
    warmup = min(total, (stages - 1) * a_round + 2 * (pp - 1 - rank))
    for turn in range(total + warmup):
        if turn < total:
            yield turn // a_round % stages
        if turn >= warmup:
            yield stages - 1 - (turn - warmup) // a_round % stages


def _next_stages(passes: Sequence[int], at: int) -> dict[int, int]:
    """The next stages, with the number of passes after `at` until each is needed."""
    found: dict[int, int] = {}
    for ahead, stage in enumerate(islice(passes, at, None)):
        found.setdefault(stage, ahead)
        if len(found) == STAGES_AT_ONCE:
            break
    return found


def _round(pp: int, micro_batches: int) -> int:
    """Micro batches that interleaved 1F1B runs through one stage before it switches to the next."""
    return micro_batches // max(1, micro_batches // pp)


@cache
def most_sends(spec: PipelineSpec, pp: int) -> int:
    """Hidden states and gradients that the busiest rank sends to other ranks per micro batch.

    The ends of a pipeline have only one neighbour. In a V, one rank has two neighbouring stages.
    """
    sends: Counter[int] = Counter()
    for stage in range(pp * spec.stages - 1):
        ends = {rank_of_stage(spec, pp, stage), rank_of_stage(spec, pp, stage + 1)}
        if len(ends) > 1:
            sends.update(ends)
    return max(sends.values(), default=0)


def can_run(spec: PipelineSpec, pp: int, micro_batches: int) -> bool:
    """Whether the schedule can run a step of `micro_batches`."""
    return pp == 1 or demand(spec, pp, micro_batches) is None


def bubble(spec: PipelineSpec, pp: int, micro_batches: int) -> float | None:
    """Share of a step that a rank is idle, if all stages are equally fast.

    (pp - 1) / (v m + pp - 1) with v stages per rank (Narayanan et al. 2021, section 2.2). None for
    ZBV, which fills most of the bubble with weight gradients.
    """
    if spec.schedule == "zbv":
        return None
    return (pp - 1) / (spec.stages * micro_batches + pp - 1)

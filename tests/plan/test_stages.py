"""Constraints and memory of pipelines, compared with the schedules of torch."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action
from torch.distributed.pipelining.schedules import _ComputationType as Kind

from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import demand
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.stages import bubble, can_run, kept_passes, stage_gathers, stage_ranks

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
SPECS = [
    PipelineSpec(schedule="gpipe"),
    PipelineSpec(schedule="1f1b"),
    PipelineSpec(schedule="interleaved_1f1b"),
    PipelineSpec(schedule="interleaved_1f1b", stages_per_rank=3),
    PipelineSpec(schedule="zbv"),
]


class Stage:
    """The attributes of a stage that torch's schedules read when they are created."""

    has_backward = True
    group_rank = 0
    submod = torch.nn.Identity()
    device = torch.device("cpu")

    def __init__(self, index: int, pp: int, num_stages: int) -> None:
        self.stage_index = index
        self.group_size = pp
        self.num_stages = num_stages
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}


def torch_schedule(spec: PipelineSpec, pp: int, micro_batches: int) -> Any:
    """torch's schedule on the first rank. Raises ValueError if torch refuses it."""
    num_stages = pp * spec.stages
    indices = [0, num_stages - 1] if spec.schedule == "zbv" else range(0, num_stages, pp)
    stages = [Stage(index, pp, num_stages) for index in indices]
    several = spec.stages > 1
    return SCHEDULES[spec.schedule](
        stages if several else stages[0],
        n_microbatches=micro_batches,
        loss_fn=torch.nn.functional.mse_loss,
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_constraints_of_a_schedule_equal_those_of_torch(spec: PipelineSpec) -> None:
    for pp in (2, 3, 4):
        for micro_batches in range(1, 14):
            try:
                torch_schedule(spec, pp, micro_batches)
            except ValueError:
                assert demand(spec, pp, micro_batches), (pp, micro_batches)
                assert not can_run(spec, pp, micro_batches)
            else:
                assert can_run(spec, pp, micro_batches), (pp, micro_batches)


def most_kept(order: list[_Action | None]) -> int:
    """The largest number of forward passes of a rank that wait for their backward pass."""
    kept = most = 0
    for action in order:
        kind = action.computation_type if action else None
        kept += (kind is Kind.FORWARD) - (kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT))
        most = max(most, kept)
    return most


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_rank_keeps_as_many_micro_batches_as_torchs_schedule_keeps(spec: PipelineSpec) -> None:
    for pp in (2, 4):
        for micro_batches in (1, 2, 4, 8, 12):
            if not can_run(spec, pp, micro_batches):
                continue
            order = torch_schedule(spec, pp, micro_batches).pipeline_order
            told = [most_kept(order[rank]) for rank in range(pp)]
            kept = [kept_passes(spec, pp, rank, micro_batches) for rank in range(pp)]
            if spec.schedule == "zbv" and micro_batches < 2 * pp - 1:
                # torch drops micro batches from its full schedule, so some ranks keep fewer.
                assert all(most <= bound for most, bound in zip(told, kept, strict=True))
            else:
                assert kept == told, (pp, micro_batches)


@pytest.mark.parametrize("stages", [2, 4, 5])
def test_stages_are_gathered_as_often_as_in_torchs_schedule(stages: int) -> None:
    spec = PipelineSpec(schedule="interleaved_1f1b", stages_per_rank=stages)
    for pp in (2, 4):
        for micro_batches in (1, 4, 8, 12):
            orders = torch_schedule(spec, pp, micro_batches).pipeline_order_with_comms
            for rank in range(pp):
                told = Counter(
                    action.stage_index // pp
                    for action in orders[rank]
                    if action.computation_type is Kind.UNSHARD
                )
                found = stage_gathers(spec, pp, rank, micro_batches)
                assert [len(times) for times in found] == [told[stage] for stage in range(stages)]


def layers(count: int) -> ModelShape:
    return shape_of({**PRESETS["llama-tiny"], "num_hidden_layers": count})


def test_ranks_have_their_share_of_layers_and_the_outer_ones_embedding_or_head() -> None:
    first, *between, last = stage_ranks(layers(10), 4, PipelineSpec(), 8, 8)
    assert (first.layers, first.is_first, first.is_last, first.kept) == (2, True, False, 4)
    assert (last.layers, last.is_first, last.is_last, last.kept) == (2, False, True, 1)
    assert not any(rank.is_first or rank.is_last for rank in between)


def test_a_v_schedule_has_both_ends_on_one_rank() -> None:
    ends, *others = stage_ranks(layers(16), 4, PipelineSpec(schedule="zbv"), 8, 8)
    assert (ends.layers, ends.is_first, ends.is_last, ends.kept) == (4, True, True, 4)
    assert not any(rank.is_first or rank.is_last for rank in others)


def test_without_a_pipeline_one_rank_has_all_and_keeps_one_micro_batch() -> None:
    (rank,) = stage_ranks(layers(10), 1, PipelineSpec(schedule="gpipe"), 8, 8)
    assert (rank.layers, rank.is_first, rank.is_last, rank.kept) == (10, True, True, 1)


def test_even_stages_have_as_many_layers_whatever_the_head_costs() -> None:
    shape = shape_of(PRESETS["llama3-8b"])
    balanced, even = (
        [rank.layers for rank in stage_ranks(shape, 8, PipelineSpec(), 8, 8192, even)]
        for even in (False, True)
    )
    assert even == [4] * 8
    assert balanced[-1] < 4, "the head is as much work as two layers"
    uneven = stage_ranks(layers(10), 4, PipelineSpec(), 8, 8, even=True)
    assert [rank.layers for rank in uneven] == [3, 3, 2, 2]


def test_the_bubble_equals_the_published_formula() -> None:
    assert bubble(PipelineSpec(), 4, 32) == pytest.approx(0.0857, abs=1e-4)
    interleaved = PipelineSpec(schedule="interleaved_1f1b", stages_per_rank=4)
    assert bubble(interleaved, 4, 8) == pytest.approx(3 / 35)
    assert bubble(PipelineSpec(schedule="zbv"), 4, 8) is None

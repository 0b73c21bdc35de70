"""Splitting a model into stages: balanced, complete, and each stage on one rank."""

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from transformers import PretrainedConfig

from orchestrator.contract.codec import decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import cut, rank_of_stage, stages_of_rank
from orchestrator.errors import TrainingError
from trainer.config import complete
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import StageSlice
from trainer.parallel.stages import costs_of, slices_of_rank

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zbv"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")


@st.composite
def costs_and_stages(draw: st.DrawFn) -> tuple[list[int], int]:
    costs = draw(st.lists(st.integers(1, 100), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


def most_expensive(costs: list[int], stops: tuple[int, ...]) -> int:
    return max(sum(costs[a:b]) for a, b in pairwise((0, *stops, len(costs))))


@given(costs_and_stages())
def test_no_other_split_has_a_cheaper_most_expensive_stage(case: tuple[list[int], int]) -> None:
    costs, num_stages = case
    found = cut(costs, num_stages)
    assert [stop for _, stop in found[:-1]] == [first for first, _ in found[1:]]
    assert (found[0][0], found[-1][1], len(found)) == (0, len(costs), num_stages)
    assert all(first < stop for first, stop in found)
    every = combinations(range(1, len(costs)), num_stages - 1)
    best = min(most_expensive(costs, stops) for stops in every)
    assert max(sum(costs[first:stop]) for first, stop in found) == best


def test_stages_below_the_most_expensive_are_even_and_the_first_ones_short() -> None:
    assert cut([1, 1, 1, 1, 1, 9], 3) == [(0, 2), (2, 5), (5, 6)]
    assert cut([1] * 6, 4) == [(0, 1), (1, 2), (2, 4), (4, 6)]


@given(
    st.sampled_from(SCHEDULES), st.integers(2, 9), st.integers(2, 5), st.sampled_from((0, 3, 11))
)
def test_every_layer_is_on_one_rank(schedule: Schedule, pp: int, per_rank: int, more: int) -> None:
    counts = {"gpipe": 1, "1f1b": 1, "zbv": 2}
    spec = PipelineSpec(schedule=schedule, stages_per_rank=counts.get(schedule, per_rank))
    config = llama(num_hidden_layers=pp * spec.stages + more)
    slices: list[StageSlice] = []
    for rank in range(pp):
        mine = stages_of_rank(spec, pp, rank)
        assert mine == sorted(mine)
        assert [rank_of_stage(spec, pp, stage) for stage in mine] == [rank] * spec.stages
        slices += slices_of_rank(config, spec, pp, rank, 32)
    layers = sorted(layer for part in slices for layer in range(part.first, part.stop))
    assert layers == list(range(config.num_hidden_layers))
    assert sum(part.is_first for part in slices) == sum(part.is_last for part in slices) == 1


def test_the_two_ends_of_a_v_are_on_the_first_rank() -> None:
    spec = PipelineSpec(schedule="zbv")
    assert [stages_of_rank(spec, 3, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_one_rank_has_the_whole_model_with_every_schedule() -> None:
    parts = slices_of_rank(llama(), PipelineSpec(schedule="zbv"), 1, 0, 32)
    assert parts == [StageSlice(0, 4, 4)]


def llama(**changes: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 256, **changes}
    return read_model_config(ModelSpec(config={"model_type": "llama", **sizes}))


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 80},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
        {"model_type": "gpt2"},
        {"model_type": "gpt2", "n_inner": 48},
    ],
)
def test_the_cost_of_a_layer_is_its_matrices_and_its_attention(model: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = read_model_config(ModelSpec(config={**model, **sizes}))
    decoder = build_stages(config, [StageSlice(0, 3, 3)])[0]
    matrices = [p.numel() for p in decoder.layers["1"].parameters() if p.ndim == 2]
    head_dim = getattr(config, "head_dim", None) or 8
    first, middle, last = costs_of(config, 64)
    assert middle == sum(matrices) + 64 * 4 * head_dim
    assert last == middle + config.vocab_size * 32
    assert first == middle + 32


def test_a_large_head_leaves_the_last_stage_fewer_layers() -> None:
    config = llama(num_hidden_layers=8, vocab_size=256)
    spec = PipelineSpec(schedule="1f1b")
    layer = costs_of(config, 32)[1]
    config.vocab_size = 2 * layer // config.hidden_size
    parts = [slices_of_rank(config, spec, 2, rank, 32)[0] for rank in range(2)]
    assert [(part.first, part.stop) for part in parts] == [(0, 5), (5, 8)]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"pp=3 with 2 stage\(s\) .* makes 6 .* has 4 layers"):
        slices_of_rank(llama(), PipelineSpec(schedule="zbv"), 3, 0, 32)


def refused_by_us(pp: int, micro_batches: int) -> bool:
    config = {
        "model": {"preset": "llama-tiny"},
        "data": {"files": "*.txt", "sequence_length": 32},
        "parallel": {"pp": pp, "pipeline": {"schedule": "interleaved_1f1b"}},
        "micro_batch_size": 1,
        "train": {"steps": 1, "global_batch_size": micro_batches},
        "out": "out",
    }
    try:
        complete(decode(TrainingConfig, config), pp)
    except TrainingError:
        return True
    return False


def refused_by_torch(pp: int, micro_batches: int) -> bool:
    stages: list[Any] = [
        SimpleNamespace(stage_index=index, num_stages=2 * pp, group_rank=0, group_size=pp)
        for index in (0, pp)
    ]
    try:
        ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=lambda output, _: output)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_schedule_that_torch_would_refuse_is_refused_first(pp: int) -> None:
    counts = range(1, 4 * pp)
    ours = [count for count in counts if refused_by_us(pp, count)]
    assert ours == [count for count in counts if refused_by_torch(pp, count)]
    assert ours

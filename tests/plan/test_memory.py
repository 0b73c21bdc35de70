"""Counts against the models themselves, and what the items must obey."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.data import DataSpec
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.model import ModelSpec
from orchestrator.contract.presets import PRESETS
from orchestrator.contract.spec import JobSpec
from orchestrator.contract.train import TrainSpec
from orchestrator.plan.memory import activation_bytes, memory_of, sharded_parameters, show_bytes
from orchestrator.plan.shape import DEFAULTS, shape_of

LLAMA3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
TINY = PRESETS["llama-tiny"]


def spec_of(**train: Any) -> JobSpec:
    return JobSpec(
        name="a",
        model=ModelSpec(preset="llama-tiny"),
        data=DataSpec(files="x", sequence_length=256),
        train=TrainSpec(steps=1, global_batch_size=16, **train),
    )


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        PRESETS["qwen3-tiny"],
        LLAMA3_8B,
        QWEN3_4B,
        {**TINY, "tie_word_embeddings": True},
        {**TINY, "attention_bias": True, "mlp_bias": True},
        {**PRESETS["qwen3-tiny"], "attention_bias": True, "tie_word_embeddings": False},
        {**TINY, "head_dim": 32},
        {**TINY, "num_key_value_heads": None},
        {"model_type": "llama", "num_hidden_layers": 2},
        {"model_type": "qwen3", "num_hidden_layers": 2},
    ],
)
def test_parameters_are_those_of_the_model_itself(config: dict[str, Any]) -> None:
    built = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)  # type: ignore[no-untyped-call]
    assert shape_of(config).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", DEFAULTS)
def test_absent_keys_have_the_defaults_of_transformers(kind: str) -> None:
    built = transformers.AutoConfig.for_model(kind)
    derived = {key: value for key, value in DEFAULTS[kind].items() if value is not None}
    assert {key: getattr(built, key) for key in derived} == derived


def test_published_sizes_come_out() -> None:
    assert shape_of(LLAMA3_8B).parameters == 8_030_261_248
    assert shape_of(QWEN3_4B).parameters == 4_022_468_096


def test_a_rank_of_one_keeps_everything_at_16_bytes_a_parameter() -> None:
    shape = shape_of(TINY)
    items = memory_of(spec_of(), shape, Mesh(), 1, "none").items
    states = items["parameters"] + items["gradients"] + items["optimizer"]
    assert states == 16 * shape.parameters
    assert items["gathered"] == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_activations_are_about_what_autograd_keeps(preset: str) -> None:
    config, micro = PRESETS[preset], 2
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        transformers.AutoConfig.for_model(**config, use_cache=False), attn_implementation="sdpa"
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    spec = spec_of()
    tokens = torch.zeros((micro, spec.data.sequence_length), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=tokens)
    measured = sum(one.nbytes() for at, one in kept.items() if at not in weights)
    estimated = micro * activation_bytes(spec, shape_of(config), Mesh(), "none")
    assert estimated == pytest.approx(measured, rel=0.1)


def test_the_peak_is_the_sum_of_the_items() -> None:
    memory = memory_of(spec_of(), shape_of(TINY), Mesh(dp_shard=2, tp=2), 2, "none")
    assert memory.peak_bytes == sum(memory.items.values())
    assert all(size > 0 for size in memory.items.values())


powers = st.sampled_from([1, 2, 4])


@settings(deadline=None)
@given(powers, powers)
def test_more_shards_never_need_more_of_anything_they_split(dp_shard: int, tp: int) -> None:
    shape = shape_of(TINY)
    few, many = (
        memory_of(spec_of(), shape, mesh, 1, "none").items
        for mesh in (Mesh(dp_shard=dp_shard, tp=tp), Mesh(dp_shard=2 * dp_shard, tp=tp))
    )
    assert many["parameters"] <= few["parameters"]
    assert many["activations"] == few["activations"]
    whole = sharded_parameters(shape, Mesh(dp_shard=dp_shard, tp=tp)) * dp_shard * tp
    assert whole >= shape.parameters


def test_checkpointing_keeps_less_the_more_it_computes_again() -> None:
    shape = shape_of(LLAMA3_8B)
    kept = {
        kind: memory_of(spec_of(), shape, Mesh(), 1, kind).items["activations"]
        for kind in ("none", "selective", "every_k", "full")
    }
    assert kept["full"] < kept["selective"] < kept["none"]
    assert kept["full"] < kept["every_k"] < kept["none"]


def test_bfloat16_halves_what_is_computed_and_nothing_that_is_kept() -> None:
    shape, mesh = shape_of(LLAMA3_8B), Mesh(dp_shard=8)
    full, half = (
        memory_of(spec_of(dtype=dtype), shape, mesh, 1, "full").items
        for dtype in ("float32", "bfloat16")
    )
    assert half["parameters"] == full["parameters"]
    assert half["activations"] < full["activations"]
    assert half["gathered"] < full["gathered"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (80 << 30, "80 GiB"), (1 << 55, "32768 TiB")],
)
def test_bytes_are_shown_for_people(count: int, text: str) -> None:
    assert show_bytes(count) == text

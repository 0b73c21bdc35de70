"""Counts against the models themselves, and what the items must obey."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.data import DataSpec
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.model import LoraSpec, ModelSpec
from orchestrator.contract.parallel import FsdpSpec, ParallelSpec, PipelineSpec
from orchestrator.contract.presets import PRESETS
from orchestrator.contract.spec import JobSpec
from orchestrator.contract.train import OptimizerSpec, TrainSpec
from orchestrator.plan.memory.activations import activation_bytes
from orchestrator.plan.memory.peak import (
    PerParameter,
    Weights,
    adapter_parameters,
    memory_of,
    model_states,
    show_bytes,
)
from orchestrator.plan.model.families import DEFAULTS, shape_of
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import setup_of
from orchestrator.plan.stages import StageRank, stage_ranks

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
QWEN2_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
GPT2_LARGE = {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20}
TINY = PRESETS["llama-tiny"]
TINY_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def spec_of(
    parallel: Mapping[str, Any] = MappingProxyType({}),
    lora: Mapping[str, Any] | None = None,
    **train: Any,
) -> JobSpec:
    return JobSpec(
        name="a",
        model=ModelSpec(preset="llama-tiny", lora=LoraSpec(**lora) if lora else None),
        data=DataSpec(files="x", sequence_length=256),
        train=TrainSpec(steps=1, **{"global_batch_size": 16, **train}),
        parallel=ParallelSpec(**parallel),
    )


def alone(shape: ModelShape) -> StageRank:
    (rank,) = stage_ranks(shape, 1, PipelineSpec(), 1, 8)
    return rank


def items_of(
    mesh: Mesh, shape: ModelShape | None = None, micro: int = 1, **wish: Any
) -> Mapping[str, int]:
    return memory_of(
        setup_of(spec_of(**wish), shape or shape_of(TINY), mesh, micro, "none"), None
    ).items


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
        MISTRAL_7B,
        {**TINY, "model_type": "mistral", "head_dim": 32, "tie_word_embeddings": True},
        {"model_type": "mistral", "num_hidden_layers": 2},
        QWEN2_7B,
        {**TINY, "model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen2", "num_hidden_layers": 2, "head_dim": 64},
        GPT2_LARGE,
        {**TINY_GPT2, "n_inner": 96, "tie_word_embeddings": False},
        {"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 2},
        {"model_type": "gpt2"},
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
    assert shape_of(QWEN2_7B).parameters == 7_615_616_512
    assert shape_of(MISTRAL_7B).parameters == 7_241_732_096
    assert shape_of({"model_type": "gpt2"}).parameters == 124_439_808


def test_a_rank_of_one_keeps_everything_at_16_bytes_a_parameter() -> None:
    shape = shape_of(TINY)
    items = memory_of(setup_of(spec_of(), shape, Mesh(), 1, "none"), None).items
    states = items["parameters"] + items["gradients"] + items["optimizer"]
    assert states == 16 * shape.parameters
    assert items["gathered"] == 0


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        {**TINY, "model_type": "mistral"},
        {**TINY, "model_type": "qwen2"},
        TINY_GPT2,
        {**TINY_GPT2, "n_inner": 128},
    ],
)
def test_activations_are_about_what_autograd_keeps(config: dict[str, Any]) -> None:
    micro, shape = 2, shape_of(config)
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
        model.base_model(input_ids=tokens)
    measured = sum(one.nbytes() for at, one in kept.items() if at not in weights)
    estimated = micro * activation_bytes(setup_of(spec, shape, Mesh(), micro, "none"), alone(shape))
    assert estimated == pytest.approx(measured, rel=0.1)


def test_the_peak_is_the_sum_of_the_items() -> None:
    memory = memory_of(setup_of(spec_of(), shape_of(TINY), Mesh(dp_shard=2, tp=2), 2, "none"), None)
    assert memory.peak_bytes == sum(memory.items.values())
    assert all(size > 0 for size in memory.items.values())


powers = st.sampled_from([1, 2, 4])


@settings(deadline=None)
@given(powers, powers)
def test_more_shards_never_need_more_of_anything_they_split(dp_shard: int, tp: int) -> None:
    shape = shape_of(TINY)
    few, many = (
        memory_of(setup_of(spec_of(), shape, mesh, 1, "none"), None).items
        for mesh in (Mesh(dp_shard=dp_shard, tp=tp), Mesh(dp_shard=2 * dp_shard, tp=tp))
    )
    assert many["parameters"] <= few["parameters"]
    assert many["activations"] == few["activations"]
    assert few["parameters"] * dp_shard * tp >= 4 * shape.parameters


def test_checkpointing_keeps_less_the_more_it_computes_again() -> None:
    shape = shape_of(LLAMA3_8B)
    kept = {
        kind: memory_of(setup_of(spec_of(), shape, Mesh(), 1, kind), None).items["activations"]
        for kind in ("none", "selective", "every_k", "full")
    }
    assert kept["full"] < kept["selective"] < kept["none"]
    assert kept["full"] < kept["every_k"] < kept["none"]


def test_bfloat16_halves_what_is_computed_and_nothing_that_is_kept() -> None:
    shape, mesh = shape_of(LLAMA3_8B), Mesh(dp_shard=8)
    full, half = (
        memory_of(setup_of(spec_of(dtype=dtype), shape, mesh, 1, "full"), None).items
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


def gb(states: tuple[int, ...]) -> float:
    return sum(states) / 1e9


def test_states_are_the_published_ones_at_every_level_of_zero() -> None:
    """4B parameters in bf16 under Adam without master weights, on 8 ranks; and other figures of the
    same kind, whose sources count 1 GB as 1e9 bytes."""
    bf16 = PerParameter(weights=2, gradients=2, optimizer=8)
    levels = [gb(model_states(4_000_000_000, 8, level, bf16)) for level in range(4)]
    assert levels == [48, 20, 13, 6]
    ours = PerParameter()
    levels = [gb(model_states(4_000_000_000, 8, level, ours)) for level in range(4)]
    assert levels == [64, 36, 22, 8]
    assert gb(model_states(70_000_000_000, 1, 0, ours)) == 1120
    assert gb(model_states(1_400_000_000, 1, 0, ours)) == 22.4


@pytest.mark.parametrize(
    ("wish", "mesh", "sharded"),
    [
        ({"data": "ddp"}, Mesh(dp_replicate=4), set()),
        ({"data": "zero1"}, Mesh(dp_replicate=4), {"optimizer"}),
        ({"data": "zero1"}, Mesh(dp_replicate=2, cp=2), {"optimizer"}),
        ({}, Mesh(dp_shard=4), {"parameters", "gradients", "optimizer"}),
        ({}, Mesh(dp_shard=2, cp=2), {"parameters", "gradients", "optimizer"}),
    ],
)
def test_what_data_ranks_share_is_a_part_on_each(
    wish: dict[str, Any], mesh: Mesh, sharded: set[str]
) -> None:
    micro = 16 // mesh.data_parallel
    whole, items = items_of(Mesh()), items_of(mesh, micro=micro, parallel=wish)
    for item in ("parameters", "gradients", "optimizer"):
        assert items[item] == whole[item] // (4 if item in sharded else 1), item


def test_gradients_of_several_micro_batches_add_up_whole() -> None:
    one, two = (items_of(Mesh(dp_shard=4), micro=micro) for micro in (4, 2))
    assert two["gradients"] == 4 * one["gradients"]
    halves = items_of(Mesh(dp_shard=4), micro=2, reduce_dtype="bfloat16")
    assert halves["gradients"] == two["gradients"] // 2


def test_weights_that_stay_gathered_are_the_whole_model() -> None:
    shape, mesh = shape_of(TINY), Mesh(dp_shard=4)
    gathered = {
        reshard: items_of(mesh, parallel={"fsdp": FsdpSpec(reshard_after_forward=reshard)})[
            "gathered"
        ]
        for reshard in (True, 2, False)
    }
    assert gathered[True] < gathered[2] < gathered[False]
    assert gathered[False] == 4 * (shape.parameters + shape.layer_parameters)
    deep = items_of(mesh, parallel={"fsdp": FsdpSpec(forward_prefetch=2)})
    assert deep["gathered"] - gathered[True] == 4 * shape.layer_parameters


def test_copies_are_averaged_in_buckets_and_computed_with_in_their_own_type() -> None:
    shape, mesh, wish = shape_of(TINY), Mesh(dp_replicate=4), {"data": "ddp"}
    full = items_of(mesh, parallel=wish)
    assert (full["gathered"], full["buckets"]) == (0, 4 * shape.parameters)
    half = items_of(mesh, parallel=wish, dtype="bfloat16", reduce_dtype="bfloat16")
    assert half["gathered"] == half["buckets"] == 2 * shape.parameters
    assert "buckets" not in items_of(Mesh(), parallel=wish)


def test_what_is_offloaded_is_in_the_hosts_memory() -> None:
    mesh, shape = Mesh(dp_shard=4), shape_of(TINY)
    spec = spec_of({"fsdp": FsdpSpec(cpu_offload=True)})
    memory = memory_of(setup_of(spec, shape, mesh, 4, "none"), None)
    kept = memory_of(setup_of(spec_of(), shape, mesh, 4, "none"), None)
    for item in ("parameters", "gradients", "optimizer"):
        assert memory.items[item] == 0
        assert memory.host[item] == kept.items[item]
    assert memory.items["gathered"] == kept.items["gathered"]
    assert memory.peak_bytes == kept.peak_bytes - sum(memory.host.values())
    assert kept.host == {}


@pytest.mark.parametrize(
    ("name", "values"), [("adamw", 2), ("radam", 2), ("sgd", 1), ("adafactor", 0)]
)
def test_optimizers_keep_what_they_keep(name: Any, values: int) -> None:
    items = items_of(Mesh(), optimizer=OptimizerSpec(name=name))
    assert items["optimizer"] == values * items["parameters"]


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (TINY, ("q_proj", "k_proj", "v_proj", "o_proj")),
        (TINY, ("gate_proj", "down_proj")),
        ({**PRESETS["qwen3-tiny"], "head_dim": 32}, ("q_proj", "o_proj", "up_proj")),
        (TINY_GPT2, ("c_attn", "c_proj")),
    ],
)
def test_adapters_are_those_that_peft_makes(config: Any, targets: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            transformers.AutoConfig.for_model(**config)
        )
        fan_in_fan_out = config["model_type"] == "gpt2"
        wanted = peft.LoraConfig(r=4, target_modules=list(targets), fan_in_fan_out=fan_in_fan_out)
        peft.inject_adapter_in_model(wanted, model)
    shape = shape_of(config)
    spec = spec_of(lora={"rank": 4, "target_modules": targets})
    made = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert adapter_parameters(setup_of(spec, shape, Mesh(), 1, "none"), alone(shape)) == made


def test_only_adapters_have_gradients_and_moments() -> None:
    shape = shape_of(TINY)
    plain, lora, qlora = (
        items_of(Mesh(), lora=lora) for lora in (None, {"rank": 2}, {"rank": 2, "quantize": "nf4"})
    )
    trained = adapter_parameters(
        setup_of(spec_of(lora={"rank": 2}), shape, Mesh(), 1, "none"), alone(shape)
    )
    assert lora["gradients"] == 4 * trained
    assert lora["optimizer"] == 8 * trained
    assert lora["parameters"] == plain["parameters"] + 4 * trained
    saved = lora["parameters"] - qlora["parameters"]
    matrices = shape.num_layers * shape.layer_matrices
    assert saved == pytest.approx((4 - 0.516) * matrices, rel=1e-3)


def test_stages_have_their_layers_and_the_ends_theirs() -> None:
    shape, mesh = shape_of(LLAMA3_8B), Mesh(pp=4)
    ranks = stage_ranks(shape, 4, PipelineSpec(), 8, 8192)
    own = [Weights.of(shape, mesh, rank) for rank in ranks]
    assert sum(one.parameters for one in own) == shape.parameters
    assert own[1].parameters == ranks[1].layers * shape.layer_parameters
    tied = shape_of({**LLAMA3_8B, "tie_word_embeddings": True})
    copies = sum(Weights.of(tied, mesh, rank).parameters for rank in ranks)
    assert copies == tied.parameters + tied.vocabulary_parameters


def test_the_fullest_rank_of_a_pipeline_is_told() -> None:
    """The first keeps most micro batches, the last has the logits."""
    for words, kept, has_logits in ((256, 4, False), (10_000_000, 1, True)):
        shape = shape_of({**LLAMA3_8B, "vocab_size": words})
        told = items_of(Mesh(pp=4), shape, micro=4, global_batch_size=64)
        layers = stage_ranks(shape, 4, PipelineSpec(), 16, 256)[-1 if has_logits else 0].layers
        assert told["activations"] == kept * layers * one_layer(shape, micro=4)
        assert bool(told["logits"]) == has_logits


def one_layer(shape: ModelShape, micro: int) -> int:
    """What a decoder layer keeps of a micro batch."""
    alone = items_of(Mesh(), shape, micro=micro, global_batch_size=64)
    return alone["activations"] // shape.num_layers


def test_gpipe_keeps_every_micro_batch() -> None:
    wish = {"pipeline": PipelineSpec(schedule="gpipe")}
    for words, kept_by_1f1b in ((256, 4), (10_000_000, 1)):
        shape = shape_of({**LLAMA3_8B, "vocab_size": words})
        gpipe, one = (
            items_of(Mesh(pp=4), shape, micro=4, global_batch_size=64, parallel=parallel)
            for parallel in (wish, {})
        )
        assert gpipe["activations"] * kept_by_1f1b == 16 * one["activations"]
        assert gpipe["logits"] == (16 * one["logits"] if words > 256 else 0)


def test_boundaries_have_a_buffer_for_each_micro_batch() -> None:
    shape = shape_of({**LLAMA3_8B, "vocab_size": 256})
    hidden = 256 * shape.hidden_size * 4
    # Gradients come back to the first stage; four outputs wait there for theirs.
    assert items_of(Mesh(pp=4), shape)["boundaries"] == (16 + 4) * hidden
    assert "boundaries" not in items_of(Mesh(dp_shard=4), shape)


@pytest.mark.parametrize("method", ["ring", "ulysses", "all_gather"])
def test_context_parallel_cuts_what_is_kept_of_a_sequence(method: Any) -> None:
    whole, cut = (items_of(Mesh(cp=cp), parallel={"context": method}) for cp in (1, 4))
    assert cut["logits"] == whole["logits"] // 4
    assert whole["activations"] / 4 <= cut["activations"] < whole["activations"] / 3.5

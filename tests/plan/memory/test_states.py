"""The states that a rank keeps between steps, compared with real models and published figures."""

from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.job_spec import MemoryCheckpointSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.plan.memory.peak_memory import memory_of
from orchestrator.plan.memory.states import (
    PerParameter,
    adapters,
    model_states,
)
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.family_table import FAMILIES
from orchestrator.plan.model.shape import layer_sizes
from orchestrator.plan.sizes import LARGE
from tests.plan.memory.setups import SETUP, items_of, ranks_of, setup, units
from tests.plan.model.models import DEEPSEEK_V3, LLAMA3_8B, TINY, TINY_GPT2
from tests.plan.model.variants import default
from trainer.parallel.fsdp import LARGE as LARGE_OF_TRAINER


def gb(states: tuple[int, ...]) -> float:
    return sum(states) / 1e9


def test_states_equal_the_published_ones_at_every_level_of_zero() -> None:
    """4B parameters in bf16 with Adam and without master weights on 8 ranks, and other published
    figures. Their sources use 1 GB = 1e9 bytes."""
    bf16 = PerParameter(weights=2, gradients=2, optimizer=8)
    levels = [gb(model_states(4_000_000_000, 8, level, bf16)) for level in range(4)]
    assert levels == [48, 20, 13, 6]
    ours = PerParameter()
    levels = [gb(model_states(4_000_000_000, 8, level, ours)) for level in range(4)]
    assert levels == [64, 36, 22, 8]
    assert gb(model_states(70_000_000_000, 1, 0, ours)) == 1120
    assert gb(model_states(1_400_000_000, 1, 0, ours)) == 22.4


@given(st.integers(1, 10**12), st.integers(1, 10**5))
def test_a_higher_level_never_keeps_more(parameters: int, ranks: int) -> None:
    totals = [sum(model_states(parameters, ranks, level, PerParameter())) for level in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[3] * ranks >= totals[0]


def test_units_are_as_large_as_in_the_trainer() -> None:
    assert LARGE == LARGE_OF_TRAINER


@pytest.mark.parametrize("kind", FAMILIES)
def test_units_add_up_to_the_parameters(kind: str) -> None:
    shape = shape_of(default(kind))
    assert units(setup(shape=shape, tokens=8)).all.whole == shape.parameters


def test_stages_have_the_layers_without_experts_that_are_theirs() -> None:
    """The first three layers of DeepSeek-V3 are dense; the first of four stages has them all."""
    shape = shape_of(DEEPSEEK_V3)
    piped = setup(shape=shape, tokens=8, mesh=Mesh(pp=4), micro_batches=4)
    stages = ranks_of(piped)
    assert [rank.dense_layers for rank in stages] == [3, 0, 0, 0]
    held = [units(piped, rank).all.whole for rank in range(4)]
    assert sum(held) == shape.parameters
    assert held[0] < held[1]


def test_a_single_rank_keeps_16_bytes_per_parameter() -> None:
    items = items_of()
    states = items["parameters"] + items["gradients"] + items["optimizer"]
    assert states == 16 * SETUP.shape.parameters
    assert items["gathered"] == 0


@pytest.mark.parametrize(
    ("data", "mesh", "sharded"),
    [
        ("ddp", Mesh(dp_replicate=4), set()),
        ("zero1", Mesh(dp_replicate=4), {"optimizer"}),
        ("zero1", Mesh(dp_replicate=2, cp=2), {"optimizer"}),
        ("fsdp", Mesh(dp_shard=4), {"parameters", "gradients", "optimizer"}),
        ("fsdp", Mesh(dp_shard=2, cp=2), {"parameters", "gradients", "optimizer"}),
        ("fsdp", Mesh(dp_replicate=2, dp_shard=4), {"parameters", "gradients", "optimizer"}),
    ],
)
def test_each_data_rank_keeps_its_part_of_sharded_states(
    data: str, mesh: Mesh, sharded: set[str]
) -> None:
    whole, items = items_of(), items_of(mesh=mesh, data=data)
    for item in ("parameters", "optimizer"):
        assert items[item] == whole[item] // (4 if item in sharded else 1), item
    if data != "zero1":
        assert items["gradients"] == whole["gradients"] // (4 if sharded else 1)


def test_gradients_are_unsharded_during_accumulation() -> None:
    one, two = (items_of(mesh=Mesh(dp_shard=4), micro_batches=count) for count in (1, 2))
    assert two["gradients"] == 4 * one["gradients"]
    halves = items_of(mesh=Mesh(dp_shard=4), micro_batches=2, reduce_dtype="bfloat16")
    assert halves["gradients"] == two["gradients"] // 2


def test_rows_that_do_not_divide_are_padded_on_every_rank() -> None:
    """FSDP2 splits a norm of 128 values over 96 ranks into 64 parts of 2 values, and every rank
    allocates 2 values."""
    layer = units(setup(mesh=Mesh(dp_shard=96))).layer
    assert layer.shard * 96 > layer.whole
    assert units(setup(mesh=Mesh(dp_shard=32))).layer.shard * 32 == layer.whole


def test_offloaded_states_are_in_the_hosts_memory() -> None:
    mesh = Mesh(dp_shard=4)
    memory = memory_of(setup(mesh=mesh, cpu_offload=True), None)
    kept = memory_of(setup(mesh=mesh), None)
    for item in ("parameters", "gradients", "optimizer"):
        assert memory.host[item] == kept.items[item]
    assert memory.items["parameters"] == memory.items["optimizer"] == 0
    assert memory.items["gathered"] == kept.items["gathered"]
    assert memory.peak_bytes < kept.peak_bytes


def test_a_checkpoint_has_a_copy_in_the_hosts_memory() -> None:
    kept = memory_of(setup(mesh=Mesh(dp_shard=4)), None)
    assert kept.host == {"checkpoint": kept.items["parameters"] + kept.items["optimizer"]}
    lora = memory_of(setup(lora=LoraSpec(rank=2)), None)
    assert lora.host["checkpoint"] == 3 * lora.items["gradients"]
    slots = memory_of(setup(mesh=Mesh(dp_shard=4), host_slots=3), None)
    # The third is the copy that the disk is written from.
    assert slots.host["checkpoints in memory"] == 2 * kept.host["checkpoint"]


@pytest.mark.parametrize(
    ("hosts", "copies", "slots"), [(1, 0, 3), (2, 1, 4 + 2), (3, 2, 4 + 4), (9, 2, 4 + 4)]
)
def test_a_job_has_copies_on_its_other_hosts_only(hosts: int, copies: int, slots: int) -> None:
    memory = MemoryCheckpointSpec().on_hosts(hosts)
    assert (memory.copies, memory.slots) == (copies, slots)


@pytest.mark.parametrize(
    ("name", "values"), [("adamw", 2), ("radam", 2), ("sgd", 1), ("adafactor", 0)]
)
def test_each_optimizer_keeps_its_own_states(name: str, values: int) -> None:
    items = items_of(optimizer=name)
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
def test_adapters_have_the_shapes_of_peft(config: Any, targets: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            transformers.AutoConfig.for_model(**deepcopy(config))
        )
        fan_in_fan_out = config["model_type"] == "gpt2"
        wanted = peft.LoraConfig(r=4, target_modules=list(targets), fan_in_fan_out=fan_in_fan_out)
        peft.inject_adapter_in_model(wanted, model)
    lora = setup(shape=shape_of(config), lora=LoraSpec(rank=4, target_modules=targets))
    made = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert adapters(lora, ranks_of(lora)[0]).whole == made


def test_only_adapters_have_gradients_and_moments() -> None:
    shape = SETUP.shape
    plain = items_of()
    lora, qlora = (items_of(lora=LoraSpec(rank=2, quantize=how)) for how in ("none", "nf4"))
    one = setup(lora=LoraSpec(rank=2))
    trained = adapters(one, ranks_of(one)[0]).whole
    assert lora["gradients"] == 4 * trained
    assert lora["optimizer"] == 8 * trained
    assert lora["parameters"] == plain["parameters"] + 4 * trained
    saved = lora["parameters"] - qlora["parameters"]
    matrices = shape.num_layers * shape.layer_matrices
    assert saved == pytest.approx((4 - 0.516) * matrices, rel=1e-3)


def test_stages_have_their_layers_and_the_outer_ones_embedding_and_head() -> None:
    shape = shape_of(LLAMA3_8B)
    four = setup(shape=shape, mesh=Mesh(pp=4), micro_batches=8, tokens=8192)
    own = [units(four, rank).all.whole for rank in range(4)]
    assert sum(own) == shape.parameters
    assert own[1] == ranks_of(four)[1].layers * sum(layer_sizes(shape))
    tied = shape_of({**LLAMA3_8B, "tie_word_embeddings": True})
    four = setup(shape=tied, mesh=Mesh(pp=4), micro_batches=8, tokens=8192)
    copies = sum(units(four, rank).all.whole for rank in range(4))
    assert copies == tied.parameters + tied.vocabulary_parameters

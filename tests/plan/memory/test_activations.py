"""The activations that layers keep for their backward pass."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.plan.memory.activations import layer_of
from orchestrator.plan.model.families import shape_of
from tests.plan.memory.setups import items_of, pipeline, setup
from tests.plan.model.models import LLAMA3_8B, TINY, TINY_GPT2


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        PRESETS["qwen3-tiny"],
        {**TINY, "model_type": "mistral"},
        {**TINY, "model_type": "qwen2"},
        TINY_GPT2,
        {**TINY_GPT2, "n_inner": 128},
    ],
)
def test_activations_are_near_what_autograd_keeps(config: dict[str, Any]) -> None:
    micro, tokens = 2, 256
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        transformers.AutoConfig.for_model(**deepcopy(config), use_cache=False),
        attn_implementation="sdpa",
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.zeros((micro, tokens), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=ids)
    measured = sum(one.nbytes() for at, one in kept.items() if at not in weights)
    layer = layer_of(setup(shape=shape_of(config)))
    estimated = (
        micro
        * tokens
        * (
            len(model.base_model.layers)
            if hasattr(model.base_model, "layers")
            else len(model.base_model.h)
        )
        * layer.whole
    )
    assert estimated == pytest.approx(measured, rel=0.06)


def test_more_recomputation_keeps_less() -> None:
    shape = shape_of(LLAMA3_8B)
    kept = {
        kind: items_of(shape=shape, checkpointing=kind, dtype="bfloat16")["activations"]
        for kind in ("none", "elementwise", "selective", "every_k", "full")
    }
    assert kept["full"] < kept["selective"] < kept["elementwise"] < kept["none"]
    assert kept["full"] < kept["every_k"] < kept["none"]
    # Full checkpointing frees well over half (Korthikanti et al. 2022).
    assert kept["full"] < 0.2 * kept["none"]


@pytest.mark.parametrize("tp", [1, 8])
def test_selective_keeps_no_more_than_torchtitan(tp: int) -> None:
    """torchtitan's `selective` of Llama 3 405B: the layer's input, attention's output, and the
    results of query, value, gate and last product. With tp it also keeps the two scattered results,
    and the last product is as wide as the model on each rank."""
    shape = shape_of(PRESETS["llama3-405b"])
    hidden, inner, kv = 16384, 53248, 1024
    split = 4 * hidden + kv + inner if tp == 1 else 5 * hidden + kv + inner
    of_torchtitan = 2 * (split / tp + hidden * (tp > 1))
    own = setup(shape=shape, mesh=Mesh(tp=tp), checkpointing="selective", dtype="bfloat16")
    kept = layer_of(own).kept
    assert kept == pytest.approx(of_torchtitan - 2 * hidden, rel=0.01)
    every = layer_of(replace(own, checkpointing="elementwise")).kept
    assert every / kept == pytest.approx({1: 1.68, 8: 1.40}[tp], abs=0.01)


def test_a_larger_k_keeps_more() -> None:
    shape = shape_of(LLAMA3_8B)
    kept = [
        items_of(shape=shape, checkpointing="every_k", checkpoint_every=k)["activations"]
        for k in (1, 2, 4, 32)
    ]
    assert kept == sorted(kept)
    assert kept[0] == items_of(shape=shape, checkpointing="full")["activations"]


def test_bfloat16_halves_activations_but_not_float32_states() -> None:
    shape, mesh = shape_of(LLAMA3_8B), Mesh(dp_shard=8)
    full, half = (
        items_of(shape=shape, mesh=mesh, dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    assert half["parameters"] == full["parameters"]
    assert half["activations"] < full["activations"]
    assert half["gathered"] == full["gathered"] // 2


@pytest.mark.parametrize("method", ["ring", "ulysses", "all_gather"])
def test_context_parallel_divides_the_activations_of_a_sequence(method: str) -> None:
    whole, cut = (items_of(mesh=Mesh(cp=cp), context=method) for cp in (1, 4))
    assert cut["logits"] == whole["logits"] // 4
    assert whole["activations"] / 4 <= cut["activations"] < whole["activations"] / 3.5


def test_gathers_divides_them_too() -> None:
    shape = shape_of(LLAMA3_8B)
    whole, cut = (
        layer_of(setup(shape=shape, mesh=Mesh(tp=tp), checkpointing="gathers")).kept
        for tp in (1, 8)
    )
    assert cut == pytest.approx(whole / 8)
    assert whole == layer_of(setup(shape=shape, checkpointing="none")).kept


def test_sequence_parallel_divides_all_but_gathered_activations() -> None:
    shape = shape_of(LLAMA3_8B)
    whole, cut = (layer_of(setup(shape=shape, mesh=Mesh(tp=tp))).whole for tp in (1, 8))
    gathered = 2 * shape.hidden_size * 4
    assert cut == pytest.approx((whole - gathered) / 8 + gathered)


def test_gpipe_keeps_every_micro_batch() -> None:
    one, all_of_them = (
        items_of(mesh=Mesh(pp=4), micro_batches=16, pipeline=pipeline(schedule))
        for schedule in ("1f1b", "gpipe")
    )
    assert 3 < all_of_them["activations"] / one["activations"] < 4.1


def test_boundaries_have_a_buffer_for_each_micro_batch() -> None:
    items = items_of(mesh=Mesh(pp=4), micro_batches=16)
    hidden = 256 * 128 * 4
    # The first stage has a buffer for gradients, and four outputs that wait for their gradients.
    assert items["boundaries"] == (16 + 4) * hidden
    assert "boundaries" not in items_of(mesh=Mesh(dp_shard=4))

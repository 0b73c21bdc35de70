"""Activations of a layer, compared with what autograd saves in transformers' layers on a CPU."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from orchestrator.plan.memory.activations import layer_of
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.family_table import FAMILIES
from tests.plan.memory.setups import setup
from tests.plan.model.variants import built

TOKENS = 128
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": TOKENS,
}
DROPOUT = ("resid_pdrop", "attn_pdrop", "dropout", "attention_dropout")
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 96}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    # The kernel of a CPU wants values as wide as keys.
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}


def small(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """A small model with a single layer, by the family's names of its keys."""
    family = FAMILIES[kind]
    called = {**family.names, **family.called}
    own = {called.get(key, key): value for key, value in SIZES.items()}
    return {"model_type": kind, **{key: own[key] for key in own if key in family.keys}, **sizes}


def saved_per_token(config: dict[str, Any]) -> float:
    """Bytes of the tensors that the only layer saves, without weights, its input and the tables of
    rotary embeddings. Tensors that share memory count once."""
    config = {
        **config,
        **{key: 0.0 for key in DROPOUT if key in FAMILIES[config["model_type"]].keys},
    }
    known: set[int] = set()
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    model = transformers.AutoModelForCausalLM.from_config(built(config), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    layer = next(one[0] for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    forward = layer.forward

    def counted(*args: Any, **more: Any) -> Any:
        given = tree_leaves((list(model.parameters()), list(model.buffers()), args, more))
        known.update(
            one.untyped_storage().data_ptr() for one in given if isinstance(one, torch.Tensor)
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **more)

    layer.forward = counted
    # Whatever is alive keeps its address, so no two tensors count as one.
    output = model(input_ids=torch.zeros((1, TOKENS), dtype=torch.long), use_cache=False)
    assert output.logits.requires_grad
    return sum(saved.values()) / TOKENS


@pytest.mark.parametrize(
    ("kind", "sizes", "within"),
    [
        ("llama", {}, 0.005),
        ("olmo2", {}, 0.005),
        ("phi3", {}, 0.005),
        ("glm4", {"head_dim": 32}, 0.01),
        ("gpt_neox", {}, 0.005),
        ("starcoder2", {}, 0.005),
        ("helium", {"head_dim": 32}, 0.02),
        ("hyperclovax", {}, 0.005),
        ("jais2", {}, 0.005),
        ("apertus", {}, 0.01),
        ("bitnet", {}, 0.005),
        ("nanochat", {}, 0.01),
        ("persimmon", {}, 0.01),
        ("gpt2", {}, 0.005),
        ("opt", {}, 0.005),
        ("gpt_bigcode", {}, 0.005),
        ("falcon", {"parallel_attn": False, "multi_query": False, "alibi": True}, 0.005),
        (
            "minicpm3",
            {key: DEEPSEEK[key] for key in DEEPSEEK if key.endswith(("rank", "dim"))},
            0.02,
        ),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 4, "head_dim": 32}, 0.02),
        ("afmoe", {**EXPERTS, "num_experts": 8, "num_dense_layers": 0, "head_dim": 32}, 0.02),
        ("flex_olmo", {"num_experts": 8, "num_experts_per_tok": 4}, 0.02),
        ("cohere", {}, 0.005),
        ("olmo", {}, 0.005),
        ("phi", {}, 0.005),
        ("phi", {"qk_layernorm": True}, 0.01),
        ("stablelm", {}, 0.005),
        ("arcee", {"head_dim": 32}, 0.005),
        ("deepseek_v3", DEEPSEEK, 0.02),
        ("deepseek_v2", DEEPSEEK, 0.02),
        ("phimoe", {"num_local_experts": 8, "num_experts_per_tok": 2}, 0.02),
        ("olmoe", {"num_experts": 8, "num_experts_per_tok": 4}, 0.05),
        (
            "qwen2_moe",
            {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 192},
            0.05,
        ),
        (
            "ernie4_5_moe",
            {**EXPERTS, "moe_num_experts": 8, "moe_k": 4, "moe_layer_start_index": 0},
            0.05,
        ),
    ],
)
def test_a_layer_stores_what_autograd_saves(
    kind: str, sizes: dict[str, Any], within: float
) -> None:
    """With experts, the difference is the indices of their rows."""
    config = small(kind, sizes)
    shape = shape_of(config)
    planned = layer_of(setup(shape=shape, tokens=TOKENS, dtype="bfloat16")).whole
    saved = saved_per_token(config)
    # These layers save their input itself: layer norms, and OLMo-2's projections.
    if shape.has_layer_norms or kind in ("olmo2", "flex_olmo"):
        saved += shape.hidden_size * 2
    assert planned == pytest.approx(saved, rel=within)

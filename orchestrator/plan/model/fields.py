"""Computes the fields of `ModelShape` from the values of a family's keys."""

from collections.abc import Mapping
from typing import Any

from orchestrator.plan.model.family import Family
from orchestrator.plan.model.shape import Latent

LAST_LAYER = "moe_layer_end_index"
"""A key that may also be -1."""
CHOSEN = frozenset({"num_experts_per_tok", "moe_k", "moe_topk"})
"""The number of experts that a token uses."""
SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "num_shared_expert")
"""The number of experts that every token uses."""
UNLIMITED = 2**31
"""`max_positions` of a model that takes sequences of any length."""
STORED_BY = {
    **dict.fromkeys(("relu", "tanh", "sigmoid"), 1.0),
    **dict.fromkeys(("relu2", "gelu", "gelu_pytorch_tanh", "silu", "swish", "mish"), 2.0),
    **dict.fromkeys(("relu6", "leaky_relu"), 2.0),
    **dict.fromkeys(("gelu_new", "gelu_python_tanh", "gelu_accurate"), 5.0),
    "quick_gelu": 3.0,
    "gelu_python": 4.0,
    "gelu_fast": 8.0,
    "prelu": 2.0,
    # Five and the choice between its two branches, a byte.
    "xielu": 5.5,
}
"""Values per inner feature that an MLP without a gate stores, by activation: what the activation
stores, and its result. `relu` stores only its result; `gelu_new` consists of many operations."""

WEIGHTS_OF = {"prelu": 1, "xielu": 2}
"""Parameters of the activations that have some."""


def values_by_llamas_names(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys, also under Llama's names, and what `Family.only` says."""
    called = {**family.names, **family.called}
    found = {name: values[key] for name, key in called.items() if key in values}
    return {**fixed(family, values), **found, **values}


def fixed(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The only values that can be planned, by key."""
    return {
        key: values.get(only, only) if isinstance(only, str) else only
        for key, only in family.only.items()
    }


def fields_of(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a family's model; `values` have Llama's names too."""
    traits = {
        field: values[trait] if isinstance(trait, str) else trait
        for field, trait in family.traits.items()
    }
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    kv_heads = values.get("num_key_value_heads") or heads
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        kv_heads = 1
    head_dim = values.get("head_dim") or hidden // heads
    all_biases = values.get("use_bias", False)
    bias = values.get("attention_bias", all_biases)
    fields = {
        "hidden_size": hidden,
        "intermediate_size": values.get("intermediate_size") or 4 * hidden,
        "num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": values.get("max_position_embeddings", UNLIMITED),
        "attention_dropout": values.get("attention_dropout", 0.0),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": values.get("mlp_bias", all_biases),
        "layer_norms": _norms(values),
        "rotary": not values.get("alibi", False),
        # transformers copies keys and values of Falcon-40B, so they are no views.
        "one_projection": values.get("new_decoder_architecture") is False,
    }
    if not traits.get("gated", True) and "hidden_act" in values:
        fields["mlp_values"] = STORED_BY[values["hidden_act"]]
        fields["activation_weights"] = WEIGHTS_OF.get(values["hidden_act"], 0)
    if values.get("use_qk_norm", values.get("qk_layernorm", True)):
        each = {"": (), "head": (1, 1), "biased": (1, 1, 1, 1), "all": (heads, kv_heads)}
        fields["qk_norm_sizes"] = tuple(number * head_dim for number in each[family.qk_norm])
    return {**fields, **traits, **_latent(values), **_experts(values)}


def _norms(values: Mapping[str, Any]) -> int:
    """Norms of a layer, where keys say it."""
    if values.get("use_post_norm"):
        return 4
    if "parallel_attn" in values:
        # Falcon-40B normalises the input of attention and MLP twice, Falcon-7B once.
        two = values["new_decoder_architecture"] and values["num_ln_in_parallel_attn"] != 1
        return 2 if two or not values["parallel_attn"] else 1
    # Of GPT-NeoX the two have norms of their own even in parallel.
    return 1 if values.get("use_parallel_residual") and "use_qkv_bias" in values else 2


def _latent(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of latent attention; empty for a family without it."""
    if "kv_lora_rank" not in values:
        return {}
    rope = values["qk_rope_head_dim"]
    return {
        # Each head has its own keys and values once they are computed from the narrow vector.
        "num_kv_heads": values["num_attention_heads"],
        "head_dim": values["qk_nope_head_dim"] + rope,
        "latent": Latent(
            query_rank=values["q_lora_rank"] or 0,
            kv_rank=values["kv_lora_rank"],
            rope_dim=rope,
            value_dim=values["v_head_dim"],
        ),
    }


def _experts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields about experts; empty for a model without experts."""
    if not num_experts(values):
        return {}
    inner = values["intermediate_size"]  # of solar_open and kolibri1, that of an expert
    dense_inner = values.get("intermediate_size_mlp", inner)
    layers = range(values["num_hidden_layers"])
    dense = tuple(layer for layer in layers if not _has_experts(values, layer))
    if len(dense) == len(layers):
        return {"intermediate_size": dense_inner}
    inner = values.get("moe_intermediate_size", inner)
    return {
        "intermediate_size": inner,
        "num_experts": num_experts(values),
        "experts_per_token": next(values[key] for key in CHOSEN if key in values),
        "shared_size": _shared(values, inner),
        "dense_layers": dense,
        "dense_intermediate_size": dense_inner,
    }


def _has_experts(values: Mapping[str, Any], layer: int) -> bool:
    """By the keys of all families; a family has some of them."""
    kinds = values.get("mlp_layer_types")
    if kinds is not None:
        return bool(kinds[layer] == "sparse")
    chosen, last = values.get("moe_layers"), values.get(LAST_LAYER, -1)
    every = values.get("moe_layer_interval", values.get("decoder_sparse_step", 1))
    every = values.get("interleave_moe_layer_step", every)
    first = values.get("first_k_dense_replace", values.get("moe_layer_start_index", 0))
    if chosen is not None:
        return layer in chosen
    within = first <= layer and (last == -1 or layer <= last)
    dense = values.get("mlp_only_layers") or ()
    return within and (layer + 1) % every == 0 and layer not in dense


def _shared(values: Mapping[str, Any], inner: int) -> int:
    """Inner features of all shared experts of a layer together."""
    if "intermediate_size_mlp" in values:
        return inner
    number = next((values[key] for key in SHARED if key in values), None) or 0
    both = ("shared_expert_intermediate_size", "shared_intermediate_size")
    size: int = next((values[key] for key in both if key in values), number * inner)
    return size


def num_experts(values: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 for a family without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((values[name] for name in names if name in values), 0)

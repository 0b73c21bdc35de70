"""Configs of each family: with its defaults, and with small random values of each key."""

from copy import deepcopy
from typing import Any

import transformers
from hypothesis import strategies as st

from orchestrator.plan.model.family_table import FAMILIES
from orchestrator.plan.model.fields import STORED_BY

NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
}
"""Keys without a default with which transformers can build the model."""
BUILT_WITH = {"kimi_k2": "deepseek_v3"}
"""Families without a class in transformers, and the class that their models are built with."""
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
FIXED = {
    "vocab_size": 96,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
}


def default(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **NEEDED.get(kind, {})}


def built(config: dict[str, Any]) -> Any:
    """The config as transformers reads it."""
    kind = config["model_type"]
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    values = {**tokens, **deepcopy(config)}
    if kind == "gpt_neo":  # Each layer needs an entry. Which one it is changes no weights.
        layers = config.get("num_layers", config.get("num_hidden_layers", 24))
        values.setdefault("attention_types", [[["global"], layers]])
    return transformers.AutoConfig.for_model(**values | {"model_type": BUILT_WITH.get(kind, kind)})


@st.composite
def variants(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """A small model of the family, with a random value of each of its keys."""
    found: dict[str, Any] = {"model_type": kind}
    heads = draw(st.sampled_from((2, 4, 6)))
    hidden = heads * draw(st.sampled_from((8, 16)))
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    sizes = st.integers(1, 40)
    own: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model"), st.just(hidden)),
        **dict.fromkeys(
            ("num_hidden_layers", "n_layer", "num_layers", "n_layers"), st.just(layers)
        ),
        **dict.fromkeys(HEADS, st.just(heads)),
        **dict.fromkeys(
            ("num_key_value_heads", "num_kv_heads"),
            st.sampled_from([n for n in (1, 2, heads) if heads % n == 0]),
        ),
        "num_ln_in_parallel_attn": st.sampled_from((None, 1, 2)),
        "head_dim": st.sampled_from((None, 8, 24)),
        "qk_rope_head_dim": st.sampled_from((4, 8)),
        "q_lora_rank": st.sampled_from((None, 12)),
        **dict.fromkeys(("n_inner", "ffn_hidden_size"), st.sampled_from((None, 24))),
        "sliding_window": st.just(32),
        "mlp_only_layers": st.lists(st.integers(0, layers), max_size=2),
        "moe_layers": st.none() | st.lists(st.integers(0, layers - 1), max_size=2),
        **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), st.integers(0, layers + 1)),
        "mlp_layer_types": st.none()
        | st.lists(st.sampled_from(("dense", "sparse")), min_size=layers, max_size=layers),
        "moe_layer_start_index": st.integers(0, layers),
        "moe_layer_end_index": st.sampled_from((-1, 0, 2)),
        **dict.fromkeys(
            ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
            st.integers(1, 3),
        ),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), st.integers(1, 2)),
        **dict.fromkeys(
            ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
            st.just(experts),
        ),
        **dict.fromkeys(
            ("moe_layer_interval", "decoder_sparse_step", "interleave_moe_layer_step"),
            st.integers(1, 3),
        ),
    }
    for key, value in FAMILIES[kind].keys.items():
        if isinstance(value, bool):
            found[key] = draw(st.booleans())
        elif isinstance(value, str):
            found[key] = draw(st.sampled_from(list(STORED_BY)))
        elif key in FIXED:
            found[key] = FIXED[key]
        elif not isinstance(value, float):
            found[key] = draw(own.get(key, sizes))
    return _valid(kind, found)


def _valid(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """The values without what transformers refuses or cannot run."""
    heads = next(found[key] for key in HEADS if key in found)
    # Not every class accepts null. Some cannot do without it, and Helium's output projection has
    # the width of hidden states.
    if found.get("head_dim", 1) is None and "head_dim" not in NEEDED.get(kind, {}):
        del found["head_dim"]
    elif "head_dim" in found:
        found["head_dim"] = found["head_dim"] or 8
    if kind == "helium":
        found["head_dim"] = found["hidden_size"] // heads
    if "kv_lora_rank" in found:
        found["num_key_value_heads"] = heads
    if kind == "internlm3":
        found["mlp_bias"] = found["attention_bias"]
    if kind == "falcon" and found["new_decoder_architecture"]:
        found["parallel_attn"] = True
    elif kind == "falcon":
        found |= {"num_ln_in_parallel_attn": None, "num_kv_heads": heads}
    return found

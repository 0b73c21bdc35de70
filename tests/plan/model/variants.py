"""Configs of each family: with its defaults, and with small random values of each key."""

from copy import deepcopy
from typing import Any

import transformers
from hypothesis import strategies as st

from orchestrator.plan.model.family_table import FAMILIES

NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
}
"""Keys without a default with which transformers can build the model."""
BUILT_WITH = {"kimi_k2": "deepseek_v3"}
"""Families without a class in transformers, and the class that their models are built with."""
FIXED = {"vocab_size": 96, "max_position_embeddings": 64, "n_positions": 64}


def default(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **NEEDED.get(kind, {})}


def built(config: dict[str, Any]) -> Any:
    """The config as transformers reads it."""
    kind = config["model_type"]
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    values = {**tokens, **deepcopy(config)}
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
        **dict.fromkeys(("hidden_size", "n_embd"), st.just(hidden)),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), st.just(layers)),
        **dict.fromkeys(("num_attention_heads", "n_head"), st.just(heads)),
        "num_key_value_heads": st.sampled_from([n for n in (1, 2, heads) if heads % n == 0]),
        "head_dim": st.sampled_from((None, 8, 24)),
        "qk_rope_head_dim": st.sampled_from((4, 8)),
        "q_lora_rank": st.sampled_from((None, 12)),
        "n_inner": st.sampled_from((None, 24)),
        "sliding_window": st.just(32),
        "mlp_only_layers": st.lists(st.integers(0, layers), max_size=2),
        "moe_layers": st.none() | st.lists(st.integers(0, layers - 1), max_size=2),
        "first_k_dense_replace": st.integers(0, layers + 1),
        "moe_layer_start_index": st.integers(0, layers),
        "moe_layer_end_index": st.sampled_from((-1, 0, 2)),
        **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), st.integers(1, 3)),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), st.integers(1, 2)),
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
        elif key in FIXED:
            found[key] = FIXED[key]
        elif not isinstance(value, float):
            found[key] = draw(own.get(key, sizes))
    # Not every class accepts null. Some cannot do without it, and Helium's output projection has
    # the width of hidden states.
    if found.get("head_dim", 1) is None and "head_dim" not in NEEDED.get(kind, {}):
        del found["head_dim"]
    elif "head_dim" in found:
        found["head_dim"] = found["head_dim"] or 8
    if kind == "helium":
        found["head_dim"] = hidden // heads
    if "kv_lora_rank" in found:
        found["num_key_value_heads"] = heads
    return found

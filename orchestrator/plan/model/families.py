"""Computes the shape of a model from the values of its transformers `config.json`.

A missing key has the default of the transformers class of its `model_type`, because the trainer
builds the model with that class.
"""

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.contract.codec import nearest
from orchestrator.errors import PlanError
from orchestrator.plan.model.shape import ModelShape

LLAMA: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": LLAMA,
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "attention_bias": False,
    },
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "attention_bias": False,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "attention_bias": False,
    },
    "phi3": {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    },
    "granite": LLAMA,
    "smollm3": {
        **LLAMA,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "olmo2": {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "attention_bias": False,
    },
    "nemotron": {
        **LLAMA,
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "max_position_embeddings": 4096,
    },
    "starcoder2": {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "use_bias": True,
    },
    "gpt_neox": {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "attention_bias": True,
    },
    "mixtral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt2": {
        "vocab_size": 50257,
        "n_embd": 768,
        "n_inner": None,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
}
"""Defaults of transformers 5: of `LlamaConfig` and so on, after their constructors ran."""

ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""Other names that transformers accepts for keys of a family (`attribute_map`)."""

FLAGS = frozenset(
    {"tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "use_sliding_window"}
)
OPTIONAL = frozenset({"num_key_value_heads", "head_dim", "n_inner", "sliding_window"})
LAYERS = frozenset({"mlp_only_layers"})
"""Keys that hold lists of layer indices."""
RATES = frozenset({"attention_dropout", "attn_pdrop", "resid_pdrop"})
TRAINABLE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gpt2"})
"""Model types that the bundled trainer supports. A test compares with its `model/families.py`."""
GEMMAS = frozenset({"gemma", "gemma2", "gemma3_text"})
PLAIN = frozenset({"nemotron", "starcoder2", "gpt_neox"})
"""Families whose MLP has no gate, and whose norms are layer norms with a bias."""
QWEN_WINDOW = 4096
"""`sliding_window` of Qwen2Config and Qwen3Config, once `use_sliding_window` is true."""


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a transformers config describes.

    Raises:
        PlanError: the model type is unknown, or a value is invalid.
    """
    kind = str(config.get("model_type", "none"))
    if kind not in DEFAULTS:
        raise _unknown(kind)
    own_names = {ALIASES.get(kind, {}).get(key, key): value for key, value in config.items()}
    values = {key: own_names.get(key, default) for key, default in DEFAULTS[kind].items()}
    _check(values)
    fields = _gpt2(values) if kind == "gpt2" else _llama_like(kind, values)
    return ModelShape(
        model_type=kind,
        vocab_size=values["vocab_size"],
        tied_embeddings=values["tie_word_embeddings"],
        # A model that can be planned but not trained is planned with full attention.
        window=_window(own_names, values) if kind in TRAINABLE else None,
        notes=_misspelt(own_names, DEFAULTS[kind]),
        untrainable=None if kind in TRAINABLE else _untrainable(kind),
        **fields,
    )


def _unknown(kind: str) -> PlanError:
    """A typo gets the right spelling; another family gets a way to be planned all the same."""
    near = nearest(kind, DEFAULTS)
    # qwen2_moe is no qwen3_moe, and llama4 no llama.
    numbers = [re.findall(r"\d", name) for name in (kind, near or "")]
    further = any(kind.startswith(name) for name in DEFAULTS)
    is_typo = near is not None and numbers[0] == numbers[1] and not further
    return PlanError(
        f"model_type must be one of {', '.join(DEFAULTS)}, got {kind!r}",
        fix=f"did you mean {near}?"
        if is_typo
        else f"if {kind} is built like one of them, plan it as that family with its own sizes, for"
        " example model.config: {model_type: llama, hidden_size: …}; your own script can train any"
        " model: ndctl run -- train.py",
    )


def _untrainable(kind: str) -> str:
    known = f"the bundled trainer cannot train a {kind}, only {', '.join(sorted(TRAINABLE))}"
    has_experts = "num_experts_per_tok" in DEFAULTS[kind]
    return f"{known}; the plan has no expert parallelism" if has_experts else known


def _llama_like(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    kv_heads = values["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise PlanError(
            f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}",
            fix="correct num_key_value_heads in the model's config",
        )
    if kind == "llama":
        _check_heads(hidden, "hidden_size", heads, "num_attention_heads")
    head_dim, inner = values["head_dim"] or hidden // heads, _inner(values)
    all_biases, gated = values.get("use_bias", False), kind not in PLAIN
    bias = values.get("attention_bias", all_biases)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": values["max_position_embeddings"],
        "attention_dropout": values["attention_dropout"],
        "qkv_bias": bias or kind == "qwen2",
        "out_bias": bias,
        "mlp_bias": values.get("mlp_bias", all_biases or kind == "gpt_neox"),
        "norm_bias": kind in PLAIN,
        "gated": gated,
        "qk_norm_sizes": _qk_norm_sizes(kind, head_dim, heads, kv_heads),
        "norms_in_float32": kind in GEMMAS,
        "layer_norms": 4 if kind in ("gemma2", "gemma3_text") else 2,
        **(experts := _experts(values)),
        "linear": (
            ("q_proj", hidden, heads * head_dim),
            ("k_proj", hidden, kv_heads * head_dim),
            ("v_proj", hidden, kv_heads * head_dim),
            ("o_proj", heads * head_dim, hidden),
            # Experts are not linear layers: transformers stores all of a layer in one parameter.
            *(() if experts else _mlp(hidden, inner, gated=gated)),
        ),
    }


def _qk_norm_sizes(kind: str, head_dim: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    if kind == "olmo2":
        return heads * head_dim, kv_heads * head_dim
    return (head_dim, head_dim) if kind in ("qwen3", "qwen3_moe", "gemma3_text") else ()


def _mlp(hidden: int, inner: int, *, gated: bool) -> tuple[tuple[str, int, int], ...]:
    gate = (("gate_proj", hidden, inner),) if gated else ()
    return *gate, ("up_proj", hidden, inner), ("down_proj", inner, hidden)


def _inner(values: Mapping[str, Any]) -> int:
    """Columns inside the MLP, or inside one expert."""
    inner: int = values.get("moe_intermediate_size", values["intermediate_size"])
    return inner


def _experts(values: Mapping[str, Any]) -> dict[str, int]:
    """Fields about experts; empty for a model without experts."""
    if "num_experts_per_tok" not in values:
        return {}
    experts = values.get("num_local_experts", values.get("num_experts"))
    every, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or ()
    layers = [
        layer
        for layer in range(values["num_hidden_layers"])
        if (layer + 1) % every == 0 and layer not in dense
    ]
    if values["num_experts_per_tok"] > experts:
        raise PlanError(
            f"num_experts_per_tok={values['num_experts_per_tok']} must be at most the number of"
            f" experts, {experts}",
            fix="correct num_experts_per_tok in the model's config",
        )
    return {
        "num_experts": experts,
        "experts_per_token": values["num_experts_per_tok"],
        "expert_layers": len(layers),
        "dense_intermediate_size": values["intermediate_size"],
    }


def _gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = values["n_head"], values["n_embd"]
    _check_heads(hidden, "n_embd", heads, "n_head")
    inner = values["n_inner"] or 4 * hidden
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_layers": values["n_layer"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": values["n_positions"],
        "attention_dropout": values["attn_pdrop"],
        "residual_dropout": values["resid_pdrop"],
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "gated": False,
        "learned_positions": True,
        "fused": True,
        "linear": (
            ("c_attn", hidden, 3 * hidden),
            ("c_proj", hidden, hidden),
            ("c_fc", hidden, inner),
            ("c_proj", inner, hidden),
        ),
    }


def _window(config: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    """`ModelShape.window`, by the same rules as the trainer."""
    switched = "use_sliding_window" in values
    window: int | None = config.get("sliding_window", values.get("sliding_window"))
    if switched and "sliding_window" not in config:
        window = QWEN_WINDOW
    # Configs of other families may have `use_sliding_window` too, and it counts there as well.
    if config.get("use_sliding_window", not switched) is False:
        window = None
    others = {str(one) for one in config.get("layer_types") or ()} - {"full_attention"}
    return 0 if others and window is None else window


def _check_heads(width: int, width_key: str, heads: int, heads_key: str) -> None:
    if width % heads:
        raise PlanError(
            f"{heads_key}={heads} must divide {width_key}={width}",
            fix=f"correct {heads_key} or {width_key} in the model's config",
        )


def _check(values: Mapping[str, Any]) -> None:
    wrong = [f"  {key} must be {words}, got {values[key]!r}" for key, words in _wrong(values)]
    if wrong:
        raise PlanError(
            "\n".join(["the model's config is invalid:", *wrong]),
            fix="correct these keys of the model's config",
        )


def _wrong(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys with invalid values, and what their values must be."""
    found = []
    for key, value in values.items():
        if key in FLAGS:
            if not isinstance(value, bool):
                found.append((key, "true or false"))
        elif key in LAYERS:
            if not isinstance(value, (list, tuple, type(None))):
                found.append((key, "a list of layers"))
        elif key in RATES:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                found.append((key, "a number"))
        elif not (value is None and key in OPTIONAL) and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            found.append((key, "a whole number, at least 1"))
    return found


def _misspelt(config: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes about unknown keys. transformers accepts any key, but a key that is almost equal to a
    known one is probably a typing mistake."""
    absent = [key for key in known if key not in config]
    guesses = {key: nearest(key, absent) for key in config if key not in known}
    return tuple(
        f"the model's config has the unknown key {key}; did you mean {near}?"
        for key, near in guesses.items()
        if near and _close(key, near)
    )


def _close(one: str, other: str) -> bool:
    return abs(len(one) - len(other)) <= 2 and one[0] == other[0]

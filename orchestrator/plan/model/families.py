"""Computes the shape of a model from the values of its transformers `config.json`.

A missing key has the default of the transformers class of its `model_type`, because the trainer
builds the model with that class.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.contract.codec import nearest
from orchestrator.errors import PlanError
from orchestrator.plan.model.family_table import FAMILIES, Family
from orchestrator.plan.model.shape import Latent, ModelShape

OPTIONAL = frozenset(
    {
        *("num_key_value_heads", "head_dim", "n_inner", "sliding_window"),
        *("q_lora_rank", "n_shared_experts"),
    }
)
"""Keys that may be null."""
FROM_ZERO = frozenset(
    {
        *("n_shared_experts", "moe_num_shared_experts", "shared_intermediate_size"),
        *("shared_expert_intermediate_size", "first_k_dense_replace"),
        *("moe_layer_start_index", "moe_layer_end_index"),
    }
)
LAST_LAYER = "moe_layer_end_index"
"""A key that may also be -1."""
LISTS = frozenset({"mlp_only_layers", "moe_layers"})
"""Keys that hold lists of layer indices."""
CHOSEN = frozenset({"num_experts_per_tok", "moe_k"})
"""The number of experts that a token uses."""
TRAINABLE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gpt2"})
"""Model types that the bundled trainer supports. A test compares with its `model/families.py`."""
QWEN_WINDOW = 4096
"""`sliding_window` of Qwen2Config and Qwen3Config, once `use_sliding_window` is true."""


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a transformers config describes. Of a model with images or sound it is that of
    the text model inside.

    Raises:
        PlanError: the model type is unknown, or a value is invalid.
    """
    outer, place = str(config.get("model_type", "none")), ""
    if outer not in FAMILIES and isinstance(config.get("text_config"), Mapping):
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config, place = {**tied, **config["text_config"]}, "text_config."
    kind = str(config.get("model_type", "none"))
    if kind not in FAMILIES:
        raise _unknown(kind, place)
    family = FAMILIES[kind]
    own_names = {family.names.get(key, key): value for key, value in config.items()}
    values = {key: own_names.get(key, default) for key, default in family.keys.items()}
    _check(kind, values, place)
    fields = _gpt2(values) if kind == "gpt2" else _llama_like(family, values)
    can_train = kind in TRAINABLE and not place
    return ModelShape(
        model_type=kind,
        vocab_size=values["vocab_size"],
        tied_embeddings=values["tie_word_embeddings"],
        # A model that can be planned but not trained is planned with full attention.
        window=_window(own_names, values) if can_train else None,
        notes=_misspelt(own_names, family.keys),
        untrainable=None if can_train else _untrainable(outer, kind, values),
        **fields,
    )


def _unknown(kind: str, place: str) -> PlanError:
    """A typo gets the right spelling; another family gets a way to be planned all the same."""
    near = nearest(kind, FAMILIES)
    # qwen5_moe is no qwen3_moe, and llama4 no llama.
    numbers = [re.findall(r"\d", name) for name in (kind, near or "")]
    further = any(kind.startswith(name) for name in FAMILIES)
    is_typo = near is not None and numbers[0] == numbers[1] and not further
    return PlanError(
        f"{place}model_type must be one of {', '.join(FAMILIES)}, got {kind!r}",
        fix=f"did you mean {near}?"
        if is_typo
        else f"if {kind} is built like one of them, plan it as that family with its own sizes, for"
        " example model.config: {model_type: llama, hidden_size: …}; your own script can train any"
        " model: ndctl run -- train.py",
    )


def _untrainable(outer: str, kind: str, values: Mapping[str, Any]) -> str:
    told = f"the bundled trainer cannot train a {outer}, only {', '.join(sorted(TRAINABLE))}"
    if outer != kind:
        told += f"; planned is its text model alone, a {kind}"
    if _num_experts(values):
        told += (
            "; the plan has no expert parallelism: fsdp and tp split the experts, and fsdp gathers"
            " all experts of a layer to use it"
        )
    return told


def _num_experts(values: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 for a family without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((values[name] for name in names if name in values), 0)


def _llama_like(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    traits = {
        field: values[trait] if isinstance(trait, str) else trait
        for field, trait in family.traits.items()
    }
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    kv_heads = values.get("num_key_value_heads") or heads
    head_dim = values.get("head_dim") or hidden // heads
    all_biases = values.get("use_bias", False)
    bias = values.get("attention_bias", all_biases)
    fields = {
        "hidden_size": hidden,
        "intermediate_size": values["intermediate_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": values["max_position_embeddings"],
        "attention_dropout": values.get("attention_dropout", 0.0),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": values.get("mlp_bias", all_biases),
        "layer_norms": 1 if values.get("use_parallel_residual") else 2,
    }
    if values.get("use_qk_norm", values.get("qk_layernorm", True)):
        each = {"": (), "head": (1, 1), "all": (heads, kv_heads)}[family.qk_norm]
        fields["qk_norm_sizes"] = tuple(number * head_dim for number in each)
    return {**fields, **traits, **_latent(values), **_experts(values)}


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
    if not _num_experts(values):
        return {}
    inner = values["intermediate_size"]
    dense_inner = values.get("intermediate_size_mlp", inner)
    layers = range(values["num_hidden_layers"])
    dense = tuple(layer for layer in layers if not _has_experts(values, layer))
    if len(dense) == len(layers):
        return {"intermediate_size": dense_inner}
    inner = values.get("moe_intermediate_size", inner)
    return {
        "intermediate_size": inner,
        "num_experts": _num_experts(values),
        "experts_per_token": next(values[key] for key in CHOSEN if key in values),
        "shared_size": _shared(values, inner),
        "dense_layers": dense,
        "dense_intermediate_size": dense_inner,
    }


def _has_experts(values: Mapping[str, Any], layer: int) -> bool:
    """By the keys of all families; a family has some of them."""
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
    number = values.get("n_shared_experts", values.get("moe_num_shared_experts")) or 0
    both = ("shared_expert_intermediate_size", "shared_intermediate_size")
    size: int = next((values[key] for key in both if key in values), number * inner)
    return size


def _gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = values["n_head"], values["n_embd"]
    return {
        "hidden_size": hidden,
        "intermediate_size": values["n_inner"] or 4 * hidden,
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
        "mlp_values": 5,
        "learned_positions": True,
        "fused": True,
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


def _check(kind: str, values: Mapping[str, Any], place: str) -> None:
    wrong = dict(_wrong(FAMILIES[kind], values))
    told = [f"{key} must be {words}, got {values[key]!r}" for key, words in wrong.items()]
    told += _contradictions(kind, {key: one for key, one in values.items() if key not in wrong})
    if told:
        raise PlanError(
            "\n".join(["the model's config is invalid:", *(f"  {place}{one}" for one in told)]),
            fix="correct these keys of the model's config",
        )


def _wrong(family: Family, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys with invalid values, and what their values must be."""
    for key, default in family.keys.items():
        value = values[key]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(default, bool):
            if not isinstance(value, bool):
                yield key, "true or false"
        elif key in LISTS:
            if not (value is None or _is_layers(value)):
                yield key, "a list of layers"
        elif isinstance(default, float):
            if not whole and not isinstance(value, float):
                yield key, "a number"
        elif not (value is None and key in OPTIONAL):
            least = 0 if key in FROM_ZERO else 1
            if not (whole and (value >= least or (key == LAST_LAYER and value == -1))):
                yield key, f"a whole number, at least {least}"


def _is_layers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(type(one) is int for one in value)


def _contradictions(kind: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Pairs of values that do not fit. A value that is invalid by itself is absent."""
    pairs = {
        "llama": [("num_attention_heads", "hidden_size")],
        "gpt2": [("n_head", "n_embd")],
    }.get(kind, [])
    if "kv_lora_rank" not in FAMILIES[kind].keys:
        pairs = [*pairs, ("num_key_value_heads", "num_attention_heads")]
    for part, whole in pairs:
        if values.get(part) and values.get(whole) and values[whole] % values[part]:
            yield f"{part}={values[part]} must divide {whole}={values[whole]}"
    heads, hidden = values.get("num_attention_heads", 0), values.get("hidden_size", 0)
    if 0 < hidden < heads and not values.get("head_dim", values.get("qk_nope_head_dim")):
        yield f"num_attention_heads={heads} must be at most hidden_size={hidden}"
    experts, chosen = _num_experts(values), CHOSEN.intersection(values)
    for key in chosen:
        if experts and values[key] > experts:
            yield f"{key}={values[key]} must be at most the number of experts, {experts}"


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

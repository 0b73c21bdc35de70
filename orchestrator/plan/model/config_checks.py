"""Checks the values of a `config.json` before a shape is computed from them. All mistakes are told
at once."""

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from orchestrator.contract.codec import nearest
from orchestrator.errors import PlanError
from orchestrator.plan.model.family import Family
from orchestrator.plan.model.fields import (
    CHOSEN,
    LAST_LAYER,
    STORED_BY,
    WEIGHTS_OF,
    fixed,
    num_experts,
)

OPTIONAL = frozenset(
    {
        *("num_key_value_heads", "num_kv_heads", "head_dim", "sliding_window"),
        *("n_inner", "ffn_hidden_size", "num_ln_in_parallel_attn"),
        *("q_lora_rank", "n_shared_experts"),
    }
)
"""Keys that may be null."""
FROM_ZERO = frozenset(
    {
        *("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
        *("shared_intermediate_size", "shared_expert_intermediate_size"),
        *("first_k_dense_replace", "num_dense_layers"),
        *("moe_layer_start_index", "moe_layer_end_index"),
    }
)
LISTS = frozenset({"mlp_only_layers", "moe_layers"})
"""Keys that hold lists of layer indices."""
KINDS = "mlp_layer_types"
"""A key that says for each layer whether it has experts (`sparse`) or not (`dense`)."""
PER_LAYER = frozenset({"moe_topk", "moe_intermediate_size", "num_shared_expert"})
"""Keys that may hold a list with the value of each layer."""


def own_values(family: Family, config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The config by the family's own names of its keys, those of nested sections with their place.

    Raises:
        PlanError: one key has two names with different values. transformers would ignore one.
    """
    flat = {
        f"{key}.{inner}": value
        for key, section in config.items()
        if isinstance(section, Mapping)
        for inner, value in section.items()
    }
    found: dict[str, Any] = {}
    for key, value in {**config, **flat}.items():
        own = family.names.get(key, key)
        alike = isinstance(value, list) and value and all(one == value[0] for one in value)
        value = value[0] if own in PER_LAYER and alike else value
        if own in found and found[own] != value:
            raise PlanError(
                f"the model's config is invalid:\n  {place}{own} has two values, as"
                f" {' and '.join(name for name in config if family.names.get(name, name) == own)}"
                f" are names of one key: {found[own]!r} and {value!r}",
                fix="delete one of them",
            )
        found[own] = value
    return found


def check(
    kind: str, family: Family, config: Mapping[str, Any], values: Mapping[str, Any], place: str
) -> None:
    """Check the `values` of the family's keys, and what `config` has besides."""
    wrong = dict(_wrong(family, values))
    told = [f"{key} must be {words}, got {values[key]!r}" for key, words in wrong.items()]
    valid = {key: one for key, one in values.items() if key not in wrong}
    told += _windows({key: one for key, one in config.items() if key not in values})
    told += _contradictions(kind, family, valid)
    told += _other_models(kind, family, {**config, **values}, valid)
    if told:
        raise PlanError(
            "\n".join(["the model's config is invalid:", *(f"  {place}{one}" for one in told)]),
            fix="correct these keys of the model's config",
        )


def _windows(others: Mapping[str, Any]) -> Iterator[str]:
    """Wrong values of keys about windows, which a config may have without its family's table."""
    window, kinds = others.get("sliding_window"), others.get("layer_types")
    if window is not None and (type(window) is not int or window < 0):
        # transformers writes 0 for a Qwen2-MoE without a window.
        yield f"sliding_window must be a whole number, at least 0, or null, got {window!r}"
    if not isinstance(kinds, (list, tuple, NoneType)):
        yield f"layer_types must be a list with the kind of each layer, got {kinds!r}"


def _wrong(family: Family, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys with invalid values, and what their values must be."""
    for key, default in family.keys.items():
        words = _needed(key, default, values[key])
        if words:
            yield key, words


def _needed(key: str, default: object, value: object) -> str | None:
    """What the value must be, if it is not."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return None if str(value) in STORED_BY else f"one of {', '.join(STORED_BY)}"
    if key in LISTS:
        return None if value is None or _is_layers(value) else "a list of layers"
    if key == KINDS:
        valid = value is None or _is_kinds(value)
        return None if valid else "a list with dense or sparse for each layer"
    if isinstance(default, float):
        return None if _is_number(value) else "a number"
    return None if value is None and _may_be_null(key, default) else _whole(key, value)


def _whole(key: str, value: object) -> str | None:
    least = 0 if key in FROM_ZERO else 1
    least = -1 if key == LAST_LAYER else least
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    return None if whole else f"a whole number, at least {least}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _may_be_null(key: str, default: object) -> bool:
    # Of GPT-Neo, null is four times the hidden size. Other families need a number.
    return key in OPTIONAL or (key == "intermediate_size" and default is None)


def _is_layers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(type(one) is int for one in value)


def _is_kinds(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(one in ("dense", "sparse") for one in value)


def _contradictions(kind: str, family: Family, values: Mapping[str, Any]) -> Iterator[str]:
    """Pairs of values that do not fit. A value that is invalid by itself is absent."""
    called = {**family.names, **family.called}

    def own(name: str) -> str:
        return called.get(name, name)

    heads, hidden = own("num_attention_heads"), own("hidden_size")
    pairs = [(heads, hidden)] if family.whole_heads else []
    # With latent attention all heads have their own keys. Falcon has a rule of its own.
    if "kv_lora_rank" not in family.keys and kind != "falcon":
        pairs = [*pairs, (own("num_key_value_heads"), heads)]
    for part, whole in pairs:
        if values.get(part) and values.get(whole) and values[whole] % values[part]:
            yield f"{part}={values[part]} must divide {whole}={values[whole]}"
    given = values.get("head_dim", values.get("qk_nope_head_dim"))
    if 0 < values.get(hidden, 0) < values.get(heads, 0) and not given and not family.whole_heads:
        yield f"{heads}={values[heads]} must be at most {hidden}={values[hidden]}"
    experts, chosen = num_experts(values), CHOSEN.intersection(values)
    for key in chosen:
        if experts and values[key] > experts:
            yield f"{key}={values[key]} must be at most the number of experts, {experts}"
    kinds, layers = values.get(KINDS), values.get("num_hidden_layers")
    if kinds is not None and layers is not None and len(kinds) != layers:
        yield f"{KINDS} must have an entry for each of {layers} layers, got {len(kinds)}"


def _other_models(
    kind: str, family: Family, config: Mapping[str, Any], valid: Mapping[str, Any]
) -> Iterator[str]:
    """Values with which a model has other parts than the planner counts."""
    for key, wanted in fixed(family, valid).items():
        value, only = config.get(key), family.only[key]
        # The key that has the wanted value may be invalid itself.
        unknown = only in family.keys and only not in valid if isinstance(only, str) else False
        if value is None or value == wanted or unknown:
            continue
        like = f", like {only}" if isinstance(only, str) and only in family.keys else ""
        word = "absent" if wanted is None else repr(wanted).replace("'", "")
        word = word.lower() if isinstance(wanted, bool) else word
        yield f"{key} must be {word}{like}, got {value!r}: no other {kind} can be planned"
    activation = str(config.get("hidden_act"))
    if "hidden_act" not in family.keys and activation in WEIGHTS_OF:
        yield (
            f"hidden_act must have no weights of its own in a {kind}, got {activation!r}: only"
            " families whose MLP has no gate can be planned with it"
        )
    if kind == "falcon":
        yield from _falcons(valid)


def _falcons(valid: Mapping[str, Any]) -> Iterator[str]:
    """Combinations that transformers builds, but cannot run or ignores in part."""
    new, parallel = valid.get("new_decoder_architecture"), valid.get("parallel_attn")
    heads, kv_heads = valid.get("num_attention_heads"), valid.get("num_kv_heads")
    norms = valid.get("num_ln_in_parallel_attn")
    if new and parallel is False:
        yield "parallel_attn must be true with new_decoder_architecture=true, got false"
    if norms not in (None, 1, 2):
        yield f"num_ln_in_parallel_attn must be 1 or 2, got {norms}"
    if norms == 2 and new is False and parallel:
        yield (
            "num_ln_in_parallel_attn must be 1 or null with new_decoder_architecture=false, got 2"
        )
    if not (kv_heads and heads):
        return
    if new and heads % kv_heads:
        yield f"num_kv_heads={kv_heads} must divide num_attention_heads={heads}"
    if new is False and valid.get("multi_query") is False and kv_heads != heads:
        yield (
            f"num_kv_heads must be {heads}, like num_attention_heads, with multi_query=false and"
            f" new_decoder_architecture=false, got {kv_heads}"
        )


def misspelt(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Notes about unknown keys. transformers accepts any key, but a key that is almost equal to a
    known one is probably a typing mistake."""
    absent = [key for key in family.keys if key not in config]
    # GPT-Neo's windows are not counted, like those of other families.
    known = {"model_type", "attention_types", *family.keys, *family.only}
    # Keys of nested sections are alike because of their place.
    unknown = [key for key in config if key not in known and "." not in key]
    guesses = {key: nearest(key, absent) for key in unknown}
    return tuple(
        f"the model's config has the unknown key {key}; did you mean {near}?"
        for key, near in guesses.items()
        if near and _close(key, near)
    )


def _close(one: str, other: str) -> bool:
    return abs(len(one) - len(other)) <= 2 and one[0] == other[0]

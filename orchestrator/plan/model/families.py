"""Computes the shape of a model from the values of its transformers `config.json`.

A missing key has the default of the transformers class of its `model_type`, because the trainer
builds the model with that class.
"""

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.contract.codec import nearest
from orchestrator.errors import PlanError
from orchestrator.plan.model.config_checks import check, misspelt, own_values
from orchestrator.plan.model.family import Family
from orchestrator.plan.model.family_table import FAMILIES
from orchestrator.plan.model.fields import fields_of, num_experts, values_by_llamas_names
from orchestrator.plan.model.shape import ModelShape

TRAINABLE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gpt2"})
"""Model types that the bundled trainer supports. A test compares with its `model/families.py`."""
OTHERWISE = {
    "layers with linear attention": (
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
        *("kimi_linear", "minimax", "olmo_hybrid", "bailing_hybrid"),
    ),
    "layers without attention": (
        *("mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba", "bamba", "zamba", "zamba2"),
        *("nemotron_h", "granitemoehybrid", "recurrent_gemma", "rwkv", "xlstm"),
        *("lfm2", "lfm2_moe", "lfm3"),
    ),
    "an indexer that chooses the tokens of attention, besides the layers of deepseek_v3": (
        *("deepseek_v32", "glm_moe_dsa"),
    ),
    "layers of several sizes": (
        *("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "openelm", "deci"),
    ),
    "an encoder": ("t5", "bart", "mbart", "whisper", "bert", "roberta", "modernbert"),
}
"""Families that are often asked for and cannot be planned, by the reason."""
QWEN_WINDOW = 4096
"""`sliding_window` of Qwen2Config and Qwen3Config, once `use_sliding_window` is true."""


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a transformers config describes. Of a model with images or sound it is that of
    the text model inside.

    Raises:
        PlanError: the model type is unknown, or a value is invalid.
    """
    outer, place = str(config.get("model_type") or "model"), ""
    if outer not in FAMILIES and isinstance(config.get("text_config"), Mapping):
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config, place = {**tied, **config["text_config"]}, "text_config."
    kind = str(config.get("model_type") or "")
    if kind not in FAMILIES:
        raise _unknown(kind, place)
    family = FAMILIES[kind]
    own_names = own_values(family, config, place)
    values = {key: own_names.get(key, default) for key, default in family.keys.items()}
    check(kind, family, own_names, values, place)
    can_train = kind in TRAINABLE and not place
    return ModelShape(
        model_type=kind,
        vocab_size=values["vocab_size"],
        tied_embeddings=values["tie_word_embeddings"],
        # A model that can be planned but not trained is planned with full attention.
        window=_window(own_names, values) if can_train else None,
        notes=misspelt(own_names, family),
        untrainable=None if can_train else _untrainable(outer, kind, family, values),
        **fields_of(family, values_by_llamas_names(family, values)),
    )


def _unknown(kind: str, place: str) -> PlanError:
    """A typo gets the right spelling; another family gets a way to be planned all the same."""
    as_another = (
        "with its own sizes, for example model.config: {model_type: llama, hidden_size: …}; your"
        " own script can train any model: ndctl run -- train.py"
    )
    for why, kinds in OTHERWISE.items():
        if kind in kinds:
            return PlanError(
                f"{place}model_type {kind!r} cannot be planned: it has {why}",
                fix=f"for an estimate, plan it as another family {as_another}",
            )
    if not kind:
        return PlanError(
            f"{place}model_type, the family of the model, is missing",
            fix="add it, for example model_type: llama",
        )
    near = nearest(kind, FAMILIES)
    # qwen5_moe is no qwen3_moe, and llama4 no llama.
    numbers = [re.findall(r"\d", name) for name in (kind, near or "")]
    further = any(kind.startswith(name) for name in FAMILIES)
    is_typo = near is not None and numbers[0] == numbers[1] and not further
    return PlanError(
        f"{place}model_type {kind!r} is not one of the {len(FAMILIES)} families that can be"
        " planned",
        fix=f"did you mean {near}?"
        if is_typo
        else f"if it is built like one of {', '.join(FAMILIES)}, plan it as that family"
        f" {as_another}",
    )


def _untrainable(outer: str, kind: str, family: Family, values: Mapping[str, Any]) -> str:
    told = f"the bundled trainer cannot train a {outer}, only {', '.join(sorted(TRAINABLE))}"
    if outer != kind:
        told += f"; planned is its text model alone, a {kind}"
    if family.stores_scores:
        told += (
            "; attention is planned without a score matrix, but the one of transformers stores it:"
            " heads x tokens x tokens values, several times"
        )
    if num_experts(values):
        told += (
            "; the plan has no expert parallelism: fsdp and tp split the experts, and fsdp gathers"
            " all experts of a layer to use it"
        )
    return told


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

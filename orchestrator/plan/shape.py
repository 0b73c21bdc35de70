"""The shape of a model, as far as its split and its memory depend on it.

Read from the values of a transformers `config.json`; keys that are absent have the defaults of the
transformers class of that `model_type`, because that is what the trainer will build.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.contract.codec import nearest
from orchestrator.errors import PlanError

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
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
        "attention_bias": False,
    },
}
"""transformers 5: `LlamaConfig` and `Qwen3Config`."""

FLAGS = frozenset({"tie_word_embeddings", "attention_bias", "mlp_bias"})
OPTIONAL = frozenset({"num_key_value_heads", "head_dim"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    notes: tuple[str, ...] = ()
    """What in the config looks like a mistake."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Parameters of one decoder layer that tensor parallelism splits."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        attention_biases = self.query_size + 2 * self.kv_size if self.attention_bias else 0
        return attention + mlp + attention_biases + 2 * self.intermediate_size * self.mlp_bias

    @property
    def layer_replicated(self) -> int:
        """Parameters of one decoder layer that every tensor-parallel rank holds.

        Norms, and the biases of the two linear layers whose input is what is split.
        """
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        return norms + self.hidden_size * (self.attention_bias + self.mlp_bias)

    @property
    def layer_parameters(self) -> int:
        return self.layer_weights + self.layer_replicated

    @property
    def embedding_parameters(self) -> int:
        """Input and output embeddings; one matrix where they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Exactly what the transformers model has, counted once where weights are tied."""
        return (
            self.embedding_parameters + self.num_layers * self.layer_parameters + self.hidden_size
        )


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a transformers config describes.

    Raises:
        PlanError: the model type is unknown, or a value cannot be.
    """
    kind = str(config.get("model_type", "none"))
    if kind not in DEFAULTS:
        known = ", ".join(DEFAULTS)
        near = nearest(kind, DEFAULTS)
        raise PlanError(
            f"model_type must be one of {known}, got {kind!r}",
            fix=f"did you mean {near}?" if near else f"use a model of the families {known}",
        )
    values = {key: config.get(key, default) for key, default in DEFAULTS[kind].items()}
    wrong = [f"  {key} must be {words}, got {values[key]!r}" for key, words in _wrong(values)]
    if wrong:
        raise PlanError(
            "\n".join(["the model's config cannot be:", *wrong]),
            fix="correct these keys of the model's config",
        )
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    kv_heads = values["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise PlanError(
            f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}",
            fix="correct num_key_value_heads in the model's config",
        )
    if kind == "llama" and hidden % heads:
        raise PlanError(
            f"num_attention_heads={heads} must divide hidden_size={hidden}",
            fix="correct num_attention_heads or hidden_size in the model's config",
        )
    return ModelShape(
        model_type=kind,
        vocab_size=values["vocab_size"],
        hidden_size=hidden,
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=values["head_dim"] or hidden // heads,
        max_positions=values["max_position_embeddings"],
        tied_embeddings=values["tie_word_embeddings"],
        attention_bias=values["attention_bias"],
        mlp_bias=values.get("mlp_bias", False),
        qk_norm=kind == "qwen3",
        notes=_misspelt(config, DEFAULTS[kind]),
    )


def _wrong(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys whose value cannot be, and what it must be."""
    found = []
    for key, value in values.items():
        if key in FLAGS:
            if not isinstance(value, bool):
                found.append((key, "true or false"))
        elif not (value is None and key in OPTIONAL) and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            found.append((key, "a whole number, at least 1"))
    return found


def _misspelt(config: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, ...]:
    """transformers takes any key; one that is nearly a key of the shape is probably a mistake."""
    absent = [key for key in known if key not in config]
    guesses = {key: nearest(key, absent) for key in config if key not in known}
    return tuple(
        f"the model's config has {key}, which means nothing; did you mean {near}?"
        for key, near in guesses.items()
        if near and _close(key, near)
    )


def _close(one: str, other: str) -> bool:
    return abs(len(one) - len(other)) <= 2 and one[0] == other[0]

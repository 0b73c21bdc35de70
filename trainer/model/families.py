"""Module paths of transformers' causal language models, by model type."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PretrainedConfig

from orchestrator.errors import TrainingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Paths of modules inside the model."""

    layer_class: str
    """Class of a decoder layer, the unit of sharding, compilation and recomputation."""
    layers: str
    embedding: str
    norm: str
    """The norm after the last layer."""
    attention: str = "self_attn"
    """Path inside a layer."""
    head: str = "lm_head"
    rotary: str | None = None
    positions: str | None = None
    """Learned position embeddings."""
    dropout: str | None = None
    """Dropout after the embeddings."""
    mlp_matrices: int = 3
    """Number of matrices (features x inner features) in the MLP of a layer, the gate included."""
    tensor_parallel: bool = True


def _llama_like(layer_class: str) -> Family:
    return Family(
        layer_class=layer_class,
        layers="model.layers",
        embedding="model.embed_tokens",
        norm="model.norm",
        rotary="model.rotary_emb",
    )


FAMILIES: Mapping[str, Family] = {
    "llama": _llama_like("LlamaDecoderLayer"),
    "mistral": _llama_like("MistralDecoderLayer"),
    "qwen2": _llama_like("Qwen2DecoderLayer"),
    "qwen3": _llama_like("Qwen3DecoderLayer"),
    "gpt2": Family(
        layer_class="GPT2Block",
        layers="transformer.h",
        embedding="transformer.wte",
        positions="transformer.wpe",
        dropout="transformer.drop",
        norm="transformer.ln_f",
        attention="attn",
        mlp_matrices=2,
        tensor_parallel=False,
    ),
}


def family_of(config: PretrainedConfig) -> Family:
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise TrainingError(
            f"this trainer does not support model_type {config.model_type}",
            fix=f"use a model of one of the types {known}",
        )
    return FAMILIES[config.model_type]

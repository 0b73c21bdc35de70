"""Which model is trained, from which weights, and which part of it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Struct

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost, Matches, OneOf
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.types import Count


class LoraSpec(Struct, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al. 2021) by PEFT. The model is frozen, the adapters are trained."""

    rank: Count = 8
    """Rank of the adapters' matrices."""
    alpha: Annotated[float, Above(0)] = 16.0
    """Adapters are scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the linear layers that get an adapter."""
    quantize: Literal["none", "nf4"] = "none"
    """`nf4` stores the frozen weights in 4 bits (QLoRA, Dettmers et al. 2023)."""


class ModelSpec(Struct, frozen=True, kw_only=True):
    """Exactly one of preset, config and path names the transformers model."""

    preset: Annotated[str, OneOf(tuple(PRESETS))] | None = None
    """Name of a model in ndctl's list."""
    config: Mapping[str, Any] | None = None
    """A transformers config, inline: `{model_type: llama, hidden_size: 256, …}`."""
    path: str | None = None
    """A Hugging Face directory or a hub id in the local cache; its `config.json` is used."""
    weights: Annotated[str, Matches(r".+", "a folder or a hub id", "models/qwen3")] | None = None
    """A Hugging Face directory or a hub id in the local cache. Training starts from its
    safetensors; null draws new weights from the seed."""
    pad_vocab_to_multiple_of: Annotated[int, AtLeast(1), AtMost(1 << 20)] | None = None
    """Rounds the model's `vocab_size` up to a multiple of this number, so that tp can divide it.
    50,257 with 128 gives 50,304. No data has the added tokens. Their logits take part in the loss,
    as with `--make-vocab-size-divisible-by` of Megatron-LM. Rows that `weights` lacks start at
    0."""
    lora: LoraSpec | None = None
    """Train only adapters; null trains all weights."""

    def __post_init__(self) -> None:
        given = [key for key in ("preset", "config", "path") if getattr(self, key) is not None]
        if len(given) == 1:
            return
        first = given[0] if given else "preset"
        drop = " ".join(f"--set model.{key}=null" for key in given[1:])
        raise Invalid(
            [
                Problem(
                    path="",
                    value=", ".join(given) or "none",
                    limit="given by exactly one of preset, config, path",
                    fix=f"keep one, for example {first} ({drop})"
                    if given
                    else f"add one, for example preset: {next(iter(PRESETS))}",
                )
            ]
        )

    def padded(self, vocab_size: int) -> int:
        """Rows of the embedding of a model whose config has this `vocab_size`."""
        multiple = self.pad_vocab_to_multiple_of or 1
        return -(-vocab_size // multiple) * multiple

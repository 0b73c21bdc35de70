"""Builds this rank's pipeline stages of the model on the meta device."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.errors import TrainingError
from trainer.model.attention import register_attention
from trainer.model.decoder import Decoder, StageSlice
from trainer.model.families import family_of


def read_model_config(spec: ModelSpec) -> PretrainedConfig:
    """The transformers config of `spec`, with a padded vocabulary if it asks for it.

    Raises:
        TrainingError: transformers does not know the model, or refuses its values.
    """
    config = _unpadded(spec)
    config.vocab_size = spec.padded(config.vocab_size)
    return config


def _unpadded(spec: ModelSpec) -> PretrainedConfig:
    try:
        if spec.path is not None:
            return AutoConfig.from_pretrained(spec.path, local_files_only=True)
        # A copy, because transformers modifies nested values such as `rope_scaling`.
        values = deepcopy(dict(PRESETS[spec.preset] if spec.preset else spec.config or {}))
        return AutoConfig.for_model(values.pop("model_type", None), **values)
    # transformers raises errors of its own and of huggingface_hub, depending on the value.
    except Exception as exc:
        name = spec.path or spec.preset or "model.config"
        raise TrainingError(
            f"{name} is not a model that transformers can configure: {exc}",
            fix="give a config with a model_type such as llama, or the folder of its config.json",
        ) from exc


def check_model(config: PretrainedConfig, num_tokens: int, sequence_length: int) -> None:
    """Raises TrainingError if the model cannot train on a vocabulary of `num_tokens` tokens or on
    sequences of this length."""
    family_of(config)
    if config.vocab_size < num_tokens:
        raise TrainingError(
            f"the model's vocab_size is {config.vocab_size}, but the tokenizer has {num_tokens}"
            " tokens",
            fix=f"set vocab_size to {num_tokens} or more, or use the model's own tokenizer",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise TrainingError(
            f"sequence_length is {sequence_length}, but the model has {longest} positions",
            fix="shorten data.sequence_length or raise the model's max_position_embeddings",
        )
    _check_attention(config, sequence_length)


def _check_attention(config: PretrainedConfig, sequence_length: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    # A window at least as long as the sequence is the same as full attention.
    if (kinds or window is not None) and (window is None or window < sequence_length):
        raise TrainingError(
            f"the model attends to a window of {window} tokens, but sequences have"
            f" {sequence_length}; the trainer supports only full attention",
            fix="set sliding_window to null in the model's config, or shorten the sequences",
        )


def build_stages(config: PretrainedConfig, parts: Sequence[StageSlice]) -> list[Decoder]:
    """The decoders of `parts`, without storage.

    Raises:
        TrainingError: transformers cannot build a model of these values.
    """
    # Sequences have no padding. With a pad token, torch would not train that token's embedding.
    config.pad_token_id = None
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=register_attention(), dtype=torch.float32
            )
    # What a wrong value leads to depends on the value: an unknown activation is a KeyError.
    except Exception as exc:
        raise TrainingError(
            f"transformers cannot build the model from its config: {type(exc).__name__}: {exc}",
            fix="correct the value in model.config, or in the config.json of model.path",
        ) from exc
    return [Decoder(model, part).train() for part in parts]

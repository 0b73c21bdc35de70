"""The model: built on the meta device, and given weights once it has been cut into shards.

Each parameter's first values depend on the seed and its own name, never on the mesh. They are drawn
a whole parameter at a time and every rank keeps its part: the full model never exists anywhere.
"""

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from orchestrator.contract.presets import PRESETS
from orchestrator.contract.spec import DataSpec, ModelSpec
from orchestrator.errors import TrainingError
from trainer.attention import register_attention
from trainer.data import NUM_BYTES

LAYER_CLASSES = ("LlamaDecoderLayer", "Qwen3DecoderLayer")
"""Decoder layers whose parts the parallel plans know."""


def build_model(spec: ModelSpec, data: DataSpec) -> PreTrainedModel:
    """The model of `spec`, without storage.

    Only the `config.json` of a `path` is read: training begins from fresh weights.
    """
    config = read_model_config(spec)
    _check(config, data)
    # Sequences are full, so nothing is padding: no token's embedding may be left out of training.
    config.pad_token_id = None
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=register_attention(), dtype=torch.float32
        )
    layers_of(model)
    return model.train()


def read_model_config(spec: ModelSpec) -> PretrainedConfig:
    try:
        if spec.path is not None:
            return AutoConfig.from_pretrained(spec.path, local_files_only=True)
        values: dict[str, Any] = dict(PRESETS[spec.preset] if spec.preset else spec.config or {})
        return AutoConfig.for_model(values.pop("model_type", None), **values)
    except (OSError, ValueError, TypeError) as exc:
        name = spec.path or spec.preset or "model.config"
        raise TrainingError(
            f"{name} is not a model that transformers can configure: {exc}",
            fix="give a config with a model_type such as llama, or the folder of its config.json",
        ) from exc


def _check(config: PretrainedConfig, data: DataSpec) -> None:
    if config.vocab_size < NUM_BYTES:
        raise TrainingError(
            f"the model's vocab_size is {config.vocab_size}, and bytes are {NUM_BYTES} tokens",
            fix=f"set vocab_size to {NUM_BYTES} or more",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and data.sequence_length > longest:
        raise TrainingError(
            f"sequence_length is {data.sequence_length}, and the model has {longest} positions",
            fix="shorten data.sequence_length or raise the model's max_position_embeddings",
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise TrainingError(
            f"the model has layers with {', '.join(sorted(kinds))}; only full attention is done",
            fix="set use_sliding_window to false in the model's config",
        )


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, the units of sharding, compiling and recomputing."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(map(_is_decoder_layer, module)):
            return module
    found = sorted({type(module).__name__ for module in model.modules()})
    raise TrainingError(
        f"no decoder layer of this trainer ({' or '.join(LAYER_CLASSES)}) is in the model;"
        f" its classes are {', '.join(found)}",
        fix="train a Llama or Qwen3 model",
    )


def _is_decoder_layer(module: nn.Module) -> bool:
    # Sharding gives a module a class made on the spot, and checkpointing puts a wrapper around it.
    inner = getattr(module, "_checkpoint_wrapped_module", module)
    return any(cls.__name__ in LAYER_CLASSES for cls in type(inner).__mro__)


def tie_weights(model: PreTrainedModel) -> None:
    """Make head and embedding one parameter again: cutting or moving a module makes new ones."""
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def materialise(model: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Give the model's shards storage and their first values."""
    model.to_empty(device=device)
    tie_weights(model)
    _fill_buffers(model)
    std = model.config.initializer_range
    for name, parameter in plain_names(model).items():
        whole = _first_values(name, parameter.shape, seed, std)
        with torch.no_grad():
            _local(parameter).copy_(_part_of(whole, parameter))


def plain_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under the name it has in an unwrapped model."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter
        for name, parameter in model.named_parameters()
    }


def _fill_buffers(model: PreTrainedModel) -> None:
    """Compute the rotary frequencies again: `to_empty` leaves them undefined."""
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        if not name.endswith("rotary_emb"):
            raise TrainingError(
                f"{name} has buffers ({', '.join(buffers)}) that this trainer cannot fill",
                fix="train a Llama or Qwen3 model",
            )
        fresh = dict(type(module)(config=model.config).named_buffers())
        for key, buffer in buffers.items():
            buffer.copy_(fresh[key])


def _first_values(name: str, shape: torch.Size, seed: int, std: float) -> torch.Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)  # a norm's scale
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _part_of(whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.device_type != "cpu":
        whole = whole.to(parameter.device)
    # Every rank has the whole already: with no source rank nothing is sent.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

"""Activation checkpointing: which activations are computed again instead of being kept."""

from typing import Any, Literal

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel

from trainer.model import layers_of

Mode = Literal["none", "selective", "full", "every_k", "auto"]

COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
}
"""What `selective` keeps: the results of products, attention and communication."""


def apply_activation_checkpointing(model: PreTrainedModel, mode: Mode) -> None:
    layers = layers_of(model)
    for index in layers_to_wrap(len(layers), mode):
        layers[index] = checkpoint_wrapper(
            layers[index],
            context_fn=_keep_costly if mode == "selective" else noop_context_fn,
            # No random number is drawn in a layer without dropout.
            preserve_rng_state=model.config.attention_dropout > 0,
        )


def layers_to_wrap(num_layers: int, mode: Mode) -> list[int]:
    if mode == "none":
        return []
    every = max(1, round(num_layers**0.5)) if mode == "every_k" else 1
    return list(range(every - 1, num_layers, every))


def _keep_costly() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE

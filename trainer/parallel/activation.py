"""Activation checkpointing: which activations are computed again instead of being kept."""

from typing import Any, Literal

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainer.model.decoder import Decoder
from trainer.parallel.context.gather import gathered_attention
from trainer.parallel.context.ring import ring_attention

Mode = Literal["none", "selective", "full", "every_k", "auto"]

DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")

COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    ring_attention,
    gathered_attention,
}
"""What `selective` keeps: the results of products (addmm with a bias, _scaled_mm in float8), of
attention under the names that CPU and CUDA have for it, and of communication.

All products are kept, and not every second as torchtitan does: then nothing that takes long is done
twice, at half of the memory, and which products a count would leave out depends on the order in
which a model calls them. Whoever needs more memory has `full`.
"""


def apply_activation_checkpointing(decoder: Decoder, mode: Mode, every: int | None) -> None:
    config = decoder.config
    # No random number is drawn in a layer without dropout.
    random = any(getattr(config, key, 0) > 0 for key in DROPOUTS)
    chosen = layers_to_wrap(config.num_hidden_layers, mode, every)
    for name, layer in decoder.layers.items():
        if int(name) in chosen:
            # The default named, torch 2.13 does not compile it.
            kept: dict[str, Any] = {"context_fn": _keep_costly} if mode == "selective" else {}
            decoder.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=random, **kept)


def layers_to_wrap(num_layers: int, mode: Mode, every: int | None) -> set[int]:
    """Numbers of the layers that are computed again; `every` is the k of `every_k`, if given."""
    if mode == "none":
        return set()
    step = (every or max(1, round(num_layers**0.5))) if mode == "every_k" else 1
    return set(range(step - 1, num_layers, step))


def _keep_costly() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE

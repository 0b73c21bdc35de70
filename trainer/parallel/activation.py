"""Activation checkpointing: which activations are recomputed in the backward pass, not stored."""

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
"""Operators whose results `selective` stores: matrix products (addmm with a bias, _scaled_mm in
float8), attention (CPU and CUDA have different names for it) and communication.

torchtitan stores only every second product. Here all are stored, so that nothing slow runs twice,
at half of the memory of `none`. Counting would also make the choice depend on the order in which a
model calls its products. `full` saves more memory.
"""


def apply_activation_checkpointing(decoder: Decoder, mode: Mode, every: int | None) -> None:
    config = decoder.config
    # Without dropout, layers draw no random numbers, so their random state need not be restored.
    random = any(getattr(config, key, 0) > 0 for key in DROPOUTS)
    chosen = layers_to_wrap(config.num_hidden_layers, mode, every)
    for name, layer in decoder.layers.items():
        if int(name) in chosen:
            # torch 2.13 does not compile a wrapper with an explicit context_fn, so full has none.
            kept: dict[str, Any] = {"context_fn": _keep_costly} if mode == "selective" else {}
            decoder.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=random, **kept)


def layers_to_wrap(num_layers: int, mode: Mode, every: int | None) -> set[int]:
    """Indices of the layers to recompute; `every` is the k of `every_k` (None: √num_layers)."""
    if mode == "none":
        return set()
    step = (every or max(1, round(num_layers**0.5))) if mode == "every_k" else 1
    return set(range(step - 1, num_layers, step))


def _keep_costly() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE

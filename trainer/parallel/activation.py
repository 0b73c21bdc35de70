"""Activation checkpointing: which activations are recomputed in the backward pass, not stored."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from orchestrator.contract.spec.train_spec import (
    BY_OPERATION,
    STORES_ALL,
    Checkpointing,
    stored_products,
)
from trainer.model.adapters import LINEAR
from trainer.model.decoder import Decoder, is_adapter
from trainer.parallel.context.gather import gathered_attention
from trainer.parallel.context.in_documents import document_attention
from trainer.parallel.context.ring import ring_attention
from trainer.parallel.tensor import regather

DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
}
"""Matrix products: addmm has a bias, _scaled_mm is float8."""

STORED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    ring_attention,
    gathered_attention,
    document_attention,
}
"""Operations whose results `elementwise` and `selective` always store: attention (CPU and CUDA have
different names for it) and communication. Only the all-gather of tp is missing: its result is as
large as a layer's input on all tp ranks together, so it is gathered again."""


def apply_activation_checkpointing(
    decoder: Decoder, mode: Checkpointing, every: int | None, tp: int = 1
) -> None:
    """Wrap the layers of `decoder` that recompute, or make them gather again; `every` is the k of
    `every_k`."""
    config = decoder.config
    # Without dropout, layers draw no random numbers, so their random state need not be restored.
    random = any(getattr(config, key, 0) > 0 for key in DROPOUTS)
    chosen = layers_to_wrap(config.num_hidden_layers, mode, every)
    for name, layer in decoder.layers.items():
        if int(name) in chosen:
            kept: dict[str, Any] = {}
            # torch 2.13 does not compile a wrapper with an explicit context_fn, so full has none.
            if mode in BY_OPERATION:
                dropout = getattr(config, "resid_pdrop", 0) > 0
                stored = _stored(layer, mode, tp, dropout)
                kept["context_fn"] = partial(_contexts, stored, _adapter_rank(layer))
            decoder.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=random, **kept)
        elif mode == "gathers":
            regather(layer)


def layers_to_wrap(num_layers: int, mode: Checkpointing, every: int | None) -> set[int]:
    """Indices of the layers to recompute; `every` is the k of `every_k` (None: √num_layers)."""
    if mode in STORES_ALL:
        return set()
    step = (every or max(1, round(num_layers**0.5))) if mode == "every_k" else 1
    return set(range(step - 1, num_layers, step))


def _stored(layer: nn.Module, mode: Checkpointing, tp: int, dropout: bool) -> frozenset[int]:
    """Positions of the stored products. A layer calls its linear layers in the order in which
    transformers' modules define them."""
    paths = [
        path
        for path, module in layer.named_modules()
        if isinstance(module, LINEAR) and not is_adapter(path)
    ]
    linears = [path.removesuffix(".base_layer").rpartition(".")[2] for path in paths]
    open_end = dropout or paths[-1].endswith(".base_layer")
    return stored_products(mode, linears, tp=tp, open_end=open_end)


def _adapter_rank(layer: nn.Module) -> int:
    """The largest rank of the layer's adapters; 0 without adapters."""
    downs = (module for path, module in layer.named_modules() if ".lora_A." in f"{path}.")
    return max(
        (module.out_features for module in downs if isinstance(module, nn.Linear)), default=0
    )


def _contexts(stored: Collection[int], adapter_rank: int) -> tuple[Any, Any]:
    """The contexts of one forward pass and its recomputation."""
    done = 0

    def policy(_context: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        nonlocal done
        if op in STORED:
            return CheckpointPolicy.MUST_SAVE
        # The narrow products of adapters cost little, so they do not count.
        if op not in PRODUCTS or min(_weight(op, args).shape) <= adapter_rank:
            return CheckpointPolicy.PREFER_RECOMPUTE
        done += 1
        return (
            CheckpointPolicy.MUST_SAVE if done - 1 in stored else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def _weight(op: Any, args: Any) -> torch.Tensor:
    weight: torch.Tensor = args[2 if op is torch.ops.aten.addmm.default else 1]
    return weight

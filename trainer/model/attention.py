"""Causal attention without a mask tensor, registered with transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

NAME = "ndctl_causal"

Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor | None], torch.Tensor
]
"""Takes q [batch, heads, tokens, features], k and v [batch, kv heads, tokens, features], the scale
of the scores and `Documents.starts_BS`; returns a tensor in the shape of q. The tokens are those of
this rank. Each one attends to itself and to all earlier tokens of its document, or without
documents of the whole sequence."""


def causal_attention(  # noqa: PLR0913 (transformers' signature)
    module: nn.Module,
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`attention_mask` is `Documents.starts_BS`, which transformers' layers hand on as it is."""
    scale = q_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    attend: Attend | None = getattr(module, "attend", None)
    if attend is not None:
        out_BHTD = attend(q_BHTD, k_BHTD, v_BHTD, scale, attention_mask)
    else:
        assert attention_mask is None, "`apply_document_masks` sets `attend`"
        out_BHTD = scaled_dot_product_attention(
            q_BHTD,
            k_BHTD,
            v_BHTD,
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=q_BHTD.shape[1] != k_BHTD.shape[1],
        )
    return out_BHTD.transpose(1, 2).contiguous(), None


def attend_with(attention: nn.Module, attend: Attend) -> None:
    """Make `attention`, the module inside a decoder layer, use `attend`."""
    # transformers passes the module to `causal_attention`, which reads this attribute. It is set by
    # `object.__setattr__`, because that of nn.Module is typed for tensors and modules only.
    object.__setattr__(attention, "attend", attend)


def register_attention() -> str:
    """Register the attention; returns its name for `attn_implementation`.

    An empty mask is registered too. transformers would build a mask for the length of the hidden
    states, which under sequence parallel is only a part of the sequence.
    """
    AttentionInterface.register(NAME, causal_attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    return NAME

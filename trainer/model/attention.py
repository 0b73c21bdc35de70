"""Causal attention without a mask, under the name by which transformers' models look it up."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

NAME = "ndctl_causal"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""q [batch, heads, tokens, features], k and v [batch, kv heads, tokens, features] and the scale of
the scores, to the result in the shape of q. The tokens are those of this rank; every token sees
itself and those before it in the whole sequence."""


def causal_attention(  # noqa: PLR0913 (transformers' signature)
    module: nn.Module,
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = q_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast the rotation leaves them in float32.
    q_BHTD, k_BHTD = q_BHTD.to(v_BHTD.dtype), k_BHTD.to(v_BHTD.dtype)
    attend: Attend | None = getattr(module, "attend", None)
    if attend is not None:
        out_BHTD = attend(q_BHTD, k_BHTD, v_BHTD, scale)
    else:
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
    """Let `attention`, the module inside a decoder layer, use `attend` from now on."""
    # A plain attribute: transformers hands the module itself to the function that is registered.
    object.__setattr__(attention, "attend", attend)


def register_attention() -> str:
    """The name to give as `attn_implementation`.

    The mask is registered too: transformers would build one from the length of the hidden states,
    which under sequence parallel is a fraction of the real one.
    """
    AttentionInterface.register(NAME, causal_attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    return NAME

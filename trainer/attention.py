"""Causal attention without a mask, under the name by which transformers' models look it up."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

NAME = "ndctl_causal"


def causal_attention(  # noqa: PLR0913 (transformers' signature)
    module: torch.nn.Module,
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    out_BHTD = scaled_dot_product_attention(
        q_BHTD,
        k_BHTD,
        v_BHTD,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=q_BHTD.shape[1] != k_BHTD.shape[1],
    )
    return out_BHTD.transpose(1, 2).contiguous(), None


def register_attention() -> str:
    """The name to give as `attn_implementation`.

    The mask is registered too: transformers would build one from the length of the hidden states,
    which under sequence parallel is a fraction of the real one.
    """
    AttentionInterface.register(NAME, causal_attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    return NAME

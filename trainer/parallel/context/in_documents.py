"""Attention of one rank to whole sequences, inside documents, as one torch operator.

`operator.py` says what an operator is good for. Here it also hides that the number of documents
changes with each batch, for which torch.compile would compile again.
"""

from typing import Any

import torch

from trainer.model.attention import attend_with
from trainer.model.decoder import Decoder
from trainer.parallel.context.blocks import backward_own, forward_own
from trainer.parallel.context.documents import ends_of
from trainer.parallel.context.kernels import AttentionOutput, Block, kernel_for
from trainer.parallel.context.operator import padded


def apply_document_masks(decoder: Decoder) -> None:
    """Make each layer attend inside documents, if context parallel does not do so already."""
    for layer in decoder.layers.values():
        attend_with(layer.get_submodule(decoder.family.attention), attend_in_documents)


def attend_in_documents(
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    scale: float,
    starts_BS: torch.Tensor | None,
) -> torch.Tensor:
    """An `Attend` for tensors with all tokens of a sequence."""
    assert starts_BS is not None, "the batch has no documents"
    features = q_BHTD.shape[-1]
    q_BHTD, k_BHTD, v_BHTD = (padded(x) for x in (q_BHTD, k_BHTD, v_BHTD))
    out_BHTD, _ = document_attention(q_BHTD, k_BHTD, v_BHTD, scale, starts_BS)
    return out_BHTD.narrow(-1, 0, features)


@torch.library.custom_op("ndctl::document_attention", mutates_args=())
def _operator(
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    scale: float,
    starts_BS: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors of an `AttentionOutput`."""
    kernel = kernel_for(q_BHTD, documents=True)
    block = Block(q_BHTD, k_BHTD, v_BHTD, scale, causal=True)
    output = forward_own(kernel, block, ends_of(starts_BS))
    return output.out_BHTD, output.lse_BHT


@torch.library.custom_op("ndctl::document_attention_backward", mutates_args=())
def _backward_operator(  # noqa: PLR0913 (torch operators take tensors one by one)
    grad_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    out_BHTD: torch.Tensor,
    lse_BHT: torch.Tensor,
    scale: float,
    starts_BS: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kernel = kernel_for(q_BHTD, documents=True)
    block = Block(q_BHTD, k_BHTD, v_BHTD, scale, causal=True)
    output = AttentionOutput(out_BHTD, lse_BHT)
    return backward_own(kernel, block, output, grad_BHTD, ends_of(starts_BS))


def _shapes(q_BHTD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out_BTHD = q_BHTD.new_empty(q_BHTD.transpose(1, 2).shape)
    precision = torch.promote_types(q_BHTD.dtype, torch.float32)
    return out_BTHD.transpose(1, 2), q_BHTD.new_empty(q_BHTD.shape[:3], dtype=precision)


def _backward_shapes(grad: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, starts_BS = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output, starts_BS)


def _differentiate(ctx: Any, grad_BHTD: torch.Tensor, _: Any) -> tuple[Any, ...]:
    *saved, starts_BS = ctx.saved_tensors
    return *_backward_operator(grad_BHTD, *saved, ctx.scale, starts_BS), None, None


_operator.register_fake(_shapes)
_backward_operator.register_fake(_backward_shapes)
_operator.register_autograd(_differentiate, setup_context=_keep)
document_attention = torch.ops.ndctl.document_attention.default

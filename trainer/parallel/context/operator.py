"""Makes attention over the ranks of axis cp one torch operator with its own backward.

An operator has two advantages over an autograd.Function: activation checkpointing can store its
result and so avoid its communication, and torch.compile does not trace into it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName
from torch.nn.functional import pad

from trainer.model.attention import Attend
from trainer.parallel.context.kernels import AttentionOutput

Starts = torch.Tensor | None
"""`Documents.starts_BS`; None: a sequence is one document."""

Forward = Callable[[torch.Tensor, torch.Tensor, float, ProcessGroup, Starts], AttentionOutput]
"""Takes q [B, H, T, D], kv [2, B, H, T, D], the scale, the process group of axis cp and the
documents."""

Backward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionOutput, float, ProcessGroup, Starts],
    tuple[torch.Tensor, torch.Tensor],
]
"""Takes the gradient of the output, q, kv, the output, the scale, the process group of axis cp and
the documents. Returns the gradients of q and kv."""

MULTIPLE = 8
"""The CUDA kernels need heads whose number of features is a multiple of this."""


def attention_operator(name: str, forward: Forward, backward: Backward) -> OpOverload:
    """Register `ndctl::NAME` and `ndctl::NAME_backward`; returns the first, which is
    differentiable.

    It takes q, kv, the scale, the name of a process group and the documents, and returns the two
    tensors of an `AttentionOutput`. For the backward pass it stores q, kv and the output.
    """

    @torch.library.custom_op(f"ndctl::{name}", mutates_args=())
    def operator(
        q_BHTD: torch.Tensor,
        kv_2BHTD: torch.Tensor,
        scale: float,
        group: str,
        starts_BS: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = _resolve_process_group(GroupName(group))
        output = forward(q_BHTD, kv_2BHTD, scale, ranks, starts_BS)
        return output.out_BHTD, output.lse_BHT

    @torch.library.custom_op(f"ndctl::{name}_backward", mutates_args=())
    def backward_operator(  # noqa: PLR0913 (torch operators take tensors one by one)
        grad_BHTD: torch.Tensor,
        q_BHTD: torch.Tensor,
        kv_2BHTD: torch.Tensor,
        out_BHTD: torch.Tensor,
        lse_BHT: torch.Tensor,
        scale: float,
        group: str,
        starts_BS: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = AttentionOutput(out_BHTD, lse_BHT)
        ranks = _resolve_process_group(GroupName(group))
        return backward(grad_BHTD, q_BHTD, kv_2BHTD, output, scale, ranks, starts_BS)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        q_BHTD, kv_2BHTD, ctx.scale, ctx.group, starts_BS = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q_BHTD, kv_2BHTD, *output, starts_BS)

    def differentiate(ctx: Any, grad_BHTD: torch.Tensor, _: Any) -> tuple[Any, ...]:
        *saved, starts_BS = ctx.saved_tensors
        gradients = backward_operator(grad_BHTD, *saved, ctx.scale, ctx.group, starts_BS)
        return *gradients, None, None, None

    operator.register_fake(_shapes)
    backward_operator.register_fake(_backward_shapes)
    operator.register_autograd(differentiate, setup_context=keep)
    overload: OpOverload = getattr(torch.ops.ndctl, name).default
    return overload


def _shapes(q_BHTD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    out_BTHD = q_BHTD.new_empty(q_BHTD.transpose(1, 2).shape)
    precision = torch.promote_types(q_BHTD.dtype, torch.float32)
    return out_BTHD.transpose(1, 2), q_BHTD.new_empty(q_BHTD.shape[:3], dtype=precision)


def _backward_shapes(
    grad: Any, q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q_BHTD), torch.empty_like(kv_2BHTD)


def attend_with_operator(operator: OpOverload, group: ProcessGroup) -> Attend:
    def attend(
        q_BHTD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        scale: float,
        starts_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        features = q_BHTD.shape[-1]
        kv_2BHTD = torch.stack([k_BHTD, v_BHTD])
        q_BHTD, kv_2BHTD = padded(q_BHTD), padded(kv_2BHTD)
        out_BHTD, _ = operator(q_BHTD, kv_2BHTD, scale, group.group_name, starts_BS)
        return out_BHTD.narrow(-1, 0, features)

    return attend


def padded(heads: torch.Tensor) -> torch.Tensor:
    """`heads` [..., D] as CUDA kernels need it."""
    missing = -heads.shape[-1] % MULTIPLE if heads.is_cuda else 0
    return pad(heads, (0, missing)) if missing else heads

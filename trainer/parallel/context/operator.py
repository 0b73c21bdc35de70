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

Forward = Callable[[torch.Tensor, torch.Tensor, float, ProcessGroup], AttentionOutput]
"""Takes q [B, H, T, D], kv [2, B, H, T, D], the scale and the process group of axis cp."""

Backward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionOutput, float, ProcessGroup],
    tuple[torch.Tensor, torch.Tensor],
]
"""Takes the gradient of the output, q, kv, the output, the scale and the process group of axis cp.
Returns the gradients of q and kv."""

MULTIPLE = 8
"""The CUDA kernels need heads whose number of features is a multiple of this."""


def attention_operator(name: str, forward: Forward, backward: Backward) -> OpOverload:
    """Register `ndctl::NAME` and `ndctl::NAME_backward`; returns the first, which is
    differentiable.

    It takes q, kv, the scale and the name of a process group, and returns the two tensors of an
    `AttentionOutput`. For the backward pass it stores q, kv and the output.
    """

    @torch.library.custom_op(f"ndctl::{name}", mutates_args=())
    def operator(
        q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float, group: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = forward(q_BHTD, kv_2BHTD, scale, _resolve_process_group(GroupName(group)))
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = AttentionOutput(out_BHTD, lse_BHT)
        ranks = _resolve_process_group(GroupName(group))
        return backward(grad_BHTD, q_BHTD, kv_2BHTD, output, scale, ranks)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        q_BHTD, kv_2BHTD, ctx.scale, ctx.group = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q_BHTD, kv_2BHTD, *output)

    def differentiate(ctx: Any, grad_BHTD: torch.Tensor, _: Any) -> tuple[Any, ...]:
        gradients = backward_operator(grad_BHTD, *ctx.saved_tensors, ctx.scale, ctx.group)
        return *gradients, None, None

    operator.register_fake(_shapes)
    backward_operator.register_fake(_backward_shapes)
    operator.register_autograd(differentiate, setup_context=keep)
    overload: OpOverload = getattr(torch.ops.ndctl, name).default
    return overload


def _shapes(q_BHTD: torch.Tensor, kv: Any, scale: float, group: str) -> tuple[torch.Tensor, ...]:
    out_BTHD = q_BHTD.new_empty(q_BHTD.transpose(1, 2).shape)
    precision = torch.promote_types(q_BHTD.dtype, torch.float32)
    return out_BTHD.transpose(1, 2), q_BHTD.new_empty(q_BHTD.shape[:3], dtype=precision)


def _backward_shapes(
    grad: Any, q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q_BHTD), torch.empty_like(kv_2BHTD)


def attend_with_operator(operator: OpOverload, group: ProcessGroup) -> Attend:
    def attend(
        q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, v_BHTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        features = q_BHTD.shape[-1]
        kv_2BHTD = torch.stack([k_BHTD, v_BHTD])
        if missing := -features % MULTIPLE if q_BHTD.is_cuda else 0:
            q_BHTD, kv_2BHTD = pad(q_BHTD, (0, missing)), pad(kv_2BHTD, (0, missing))
        out_BHTD, _ = operator(q_BHTD, kv_2BHTD, scale, group.group_name)
        return out_BHTD.narrow(-1, 0, features)

    return attend

"""Head and cross-entropy in chunks of tokens, so that the logits never exist as a whole.

The forward pass of a chunk also computes its gradients, because they need the logits. A pass over
the head thus costs as much as without chunks. The weights' gradient is summed over the chunks in
the weights' type.

torch 2.13's `linear_cross_entropy` does the same on one rank. It is not used here: it cannot shard
the vocabulary over tp and has no z-loss.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

NOT_LEARNED = -100
"""Label of a token that the loss ignores."""


class HeadLoss(NamedTuple):
    """What the loss depends on, besides hidden states, weights and labels."""

    scale: float
    """Factor of the returned loss, not of the sums."""
    z_weight: float
    chunks: int
    """Number of chunks, of equal size but for the last."""
    output_dtype: torch.dtype | None
    """Type to which the logits are rounded; None: no rounding."""
    compute_dtype: torch.dtype
    """Type of the products."""
    group: dist.ProcessGroup | None
    """Ranks that hold consecutive rows of the weights: V is then this rank's part of the
    vocabulary. All of them must pass the same hidden states and labels."""
    recompute: bool
    """Compute gradients in the backward pass, from logits that are computed again. For callers that
    run many forward passes before the first backward pass, which would keep one gradient of the
    weights each."""


class Sums(NamedTuple):
    loss: torch.Tensor
    """Sum of the cross-entropies of the learned tokens, float64."""
    z_loss: torch.Tensor
    """z_weight times the sum of their squared log normalisers, float64."""


class _Gradients(NamedTuple):
    hidden_ND: torch.Tensor
    """With a `group`, this rank's summand."""
    weight_VD: torch.Tensor | None


def head_loss(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, how: HeadLoss
) -> tuple[torch.Tensor, Sums]:
    """`how.scale` times the sum of both losses, and the sums.

    The loss must be the root of the backward pass: its own gradient is taken as 1.
    """
    wanted = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    loss, *sums = _HeadLoss.apply(hidden_ND, weight_VD, labels_N, how, wanted)
    return loss, Sums(*sums)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_N: torch.Tensor,
        how: HeadLoss,
        wanted: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.how = how
        now = wanted and not how.recompute
        sums, gradients = _run(
            hidden_ND, weight_VD, labels_N, how, wanted=now, trains_head=ctx.needs_input_grad[1]
        )
        # Not as attributes of `ctx`, which live as long as the loss.
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        elif wanted:
            ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.mark_non_differentiable(*sums)
        return (how.scale * (sums.loss + sums.z_loss)).float(), *sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        # The host does not wait for this check.
        torch._assert_async(gradient == 1)
        saved = ctx.saved_tensors
        if ctx.how.recompute:
            hidden, weight, labels = saved
            trains_head = ctx.needs_input_grad[1]
            _, gradients = _run(
                hidden, weight, labels, ctx.how, wanted=True, trains_head=trains_head
            )
            assert gradients is not None
            saved = gradients
        hidden, weight = saved
        # New tensors of the same memory, because autograd copies a gradient that others refer to. A
        # zero-bubble schedule calls this twice.
        return hidden.detach(), None if weight is None else weight.detach(), None, None, None


def _run(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    how: HeadLoss,
    *,
    wanted: bool,
    trains_head: bool,
) -> tuple[Sums, _Gradients | None]:
    """The sums and, if `wanted`, the gradients; that of the weights only if `trains_head`."""
    sums = Sums(*(torch.zeros((), dtype=torch.float64, device=labels_N.device) for _ in range(2)))
    cast_VD = weight_VD.to(how.compute_dtype)
    hidden_gradient = torch.empty_like(hidden_ND) if wanted else None
    weight_gradient = torch.zeros_like(weight_VD) if wanted and trains_head else None
    size = -(-len(labels_N) // how.chunks)
    for first in range(0, len(labels_N), size):
        part = slice(first, first + size)
        rows_ND = hidden_ND[part].to(how.compute_dtype)
        d_logits_NV, factor_N = _chunk(rows_ND, cast_VD, labels_N[part], how, sums, wanted)
        if d_logits_NV is None or factor_N is None or hidden_gradient is None:
            continue
        factor_N1 = factor_N.unsqueeze(-1)
        hidden_gradient[part] = (d_logits_NV @ cast_VD) * factor_N1
        if weight_gradient is not None:
            _add_product(weight_gradient, d_logits_NV, (rows_ND * factor_N1).to(rows_ND.dtype))
        # Otherwise it would still be there with the logits of the next chunk.
        del d_logits_NV
    return sums, None if hidden_gradient is None else _Gradients(hidden_gradient, weight_gradient)


def _add_product(total_VD: torch.Tensor, left_NV: torch.Tensor, right_ND: torch.Tensor) -> None:
    if total_VD.dtype == left_NV.dtype:
        total_VD.addmm_(left_NV.T, right_ND)
    else:
        total_VD += left_NV.T @ right_ND


def _chunk(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    how: HeadLoss,
    sums: Sums,
    wanted: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Add the losses of one chunk to `sums`. If `wanted`, returns the gradient of the logits, each
    row divided by the factor that is the second result.

    With m the largest logit, s = Σ exp(logit - m) and z = m + log s, the loss of a learned token is
    log s - (logit_label - m) + w z². Its derivative by a logit is exp(logit - m) / s (1 + 2 w z) -
    [label].
    The factor is (1 + 2 w z) / s times the scale; 0 for a token that is not learned.
    """
    group = how.group
    logits_NV = hidden_ND @ weight_VD.T
    if how.output_dtype is not None:
        logits_NV = logits_NV.to(how.output_dtype)
    logits_NV = logits_NV.float()
    columns = logits_NV.shape[1]
    own_N = labels_N - (0 if group is None else group.rank() * columns)
    learned_N = labels_N != NOT_LEARNED
    here_N = learned_N & (own_N >= 0) & (own_N < columns)
    """Tokens whose label is in this rank's part of the vocabulary."""
    own_N1 = own_N.clamp(0, columns - 1).unsqueeze(-1)
    top_N = logits_NV.amax(-1)
    if group is not None:
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group=group)
    # In place, because the logits are the largest tensors of a step.
    logits_NV.sub_(top_N.unsqueeze(-1))
    label_logit_N = torch.where(here_N, logits_NV.gather(1, own_N1).squeeze(-1), 0.0)
    exp_NV = logits_NV.exp_()
    total_N = exp_NV.sum(-1)
    if group is not None:
        both = torch.stack([total_N, label_logit_N])
        dist.all_reduce(both, group=group)
        total_N, label_logit_N = both
    log_total_N = total_N.log()
    loss_N = torch.where(learned_N, log_total_N - label_logit_N, 0.0)
    z_N = torch.where(learned_N, top_N + log_total_N, 0.0)
    sums.loss.add_(loss_N.sum(dtype=torch.float64))
    if how.z_weight:
        sums.z_loss.add_(how.z_weight * z_N.square().sum(dtype=torch.float64))
    if not wanted:
        return None, None
    slope_N = 1 + 2 * how.z_weight * z_N
    exp_NV.scatter_add_(1, own_N1, (here_N * -total_N / slope_N).unsqueeze(-1))
    return exp_NV.to(hidden_ND.dtype), learned_N * slope_N / total_N * how.scale

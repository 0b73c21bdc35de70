"""The loss of next-token prediction, and its sums over one rank's tokens of a step."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import cross_entropy

NOT_LEARNED = -100
"""Label of a token that the loss ignores."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over this rank's learned tokens of a step, float64."""

    loss: torch.Tensor
    """Cross-entropies, without z-loss."""
    tokens: torch.Tensor
    """Number of learned tokens."""
    z_loss: torch.Tensor
    """What z-loss adds to the cross-entropies; zero without z-loss."""


class TokenLoss:
    """The loss of one micro batch: logits [batch, tokens, vocabulary] and labels [batch, tokens].

    It also accumulates `LossSums` until `take` is called.
    """

    def __init__(
        self, tokens_per_step: int, device: torch.device, z_weight: float | None = None
    ) -> None:
        """`tokens_per_step` counts this rank's tokens of a step, learned or not. `z_weight` is the
        weight of z-loss; None turns it off."""
        self._tokens_per_step = tokens_per_step
        self._device = device
        self._z_weight = z_weight
        self._reset()

    def _reset(self) -> None:
        self._loss, self._tokens, self._z_loss = (
            torch.zeros((), dtype=torch.float64, device=self._device) for _ in range(3)
        )

    def __call__(self, logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """This micro batch's part of the mean over all tokens, to call `backward` on.

        The mean also counts tokens that are not learned, so that a rank needs no counts of other
        ranks. `Stepper` corrects for this when the counts of all ranks are known.
        """
        logits_NV, labels_N = logits_BTV.flatten(0, 1).float(), labels_BT.flatten()
        loss = cross_entropy(logits_NV, labels_N, ignore_index=NOT_LEARNED, reduction="sum")
        if isinstance(loss, DTensor):
            # Every rank of a tensor-parallel group has the same sum.
            loss = loss.full_tensor()
        learned_N = labels_N != NOT_LEARNED
        self._loss += loss.detach()
        self._tokens += learned_N.sum()
        if self._z_weight is not None:
            z_loss = self._z_weight * squared_normalizers(logits_NV, learned_N)
            self._z_loss += z_loss.detach()
            loss = loss + z_loss
        return loss / self._tokens_per_step

    def take(self) -> LossSums:
        """The sums since the last call."""
        sums = LossSums(self._loss, self._tokens, self._z_loss)
        self._reset()
        return sums


def squared_normalizers(logits_NV: torch.Tensor, learned_N: torch.Tensor) -> torch.Tensor:
    """Sum over the learned tokens of z², where z is the log of the softmax's normaliser.

    A common shift of all logits does not change the cross-entropy. This term keeps the logits from
    drifting (PaLM, Chowdhery et al. 2022, section 5).
    """
    z_N = log_sum_exp(logits_NV)
    return torch.where(learned_N, z_N.square(), 0.0).sum()


def log_sum_exp(logits_NV: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over the vocabulary, [N]. If the vocabulary is sharded, ranks exchange only one
    maximum and one sum per token."""
    if not isinstance(logits_NV, DTensor):
        return logits_NV.logsumexp(-1)
    mesh, part_NV = logits_NV.device_mesh, logits_NV.to_local()
    top_N = _over_ranks(part_NV.detach().amax(-1), mesh, "max")
    sum_N = _over_ranks((part_NV - top_N.unsqueeze(-1)).exp().sum(-1), mesh, "sum")
    return top_N + sum_N.log()


def _over_ranks(part_N: torch.Tensor, mesh: DeviceMesh, how: str) -> torch.Tensor:
    """`part_N` of all ranks, reduced with `how` on every rank. In the backward pass each rank keeps
    the gradient of its own part unchanged, because each rank computes the same loss."""
    return DTensor.from_local(part_N, mesh, [Partial(how)], run_check=False).full_tensor()

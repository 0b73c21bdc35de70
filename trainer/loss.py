"""The loss of next-token prediction, and its sums over one rank's tokens of a step."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from orchestrator.contract.spec.train_spec import TrainSpec, chunks_of_loss
from trainer.model.chunked_loss import NOT_LEARNED, HeadLoss, head_loss


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
    """The loss of one micro batch: hidden states [batch, tokens, features], weights of the head
    [vocabulary, features] and labels [batch, tokens].

    It also accumulates `LossSums` until `pop_sums` is called.
    """

    def __init__(
        self,
        tokens_per_step: int,
        device: torch.device,
        train: TrainSpec,
        *,
        recompute: bool = False,
    ) -> None:
        """`tokens_per_step` counts this rank's tokens of a step, learned or not. For `recompute`
        see `HeadLoss`."""
        self._tokens_per_step = tokens_per_step
        self._device = device
        self._train = train
        self._recompute = recompute
        self._reset()

    def _reset(self) -> None:
        self._loss, self._tokens, self._z_loss = (
            torch.zeros((), dtype=torch.float64, device=self._device) for _ in range(3)
        )

    def __call__(
        self, hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, labels_BT: torch.Tensor
    ) -> torch.Tensor:
        """This micro batch's part of the mean over all tokens, to call `backward` on.

        The mean also counts tokens that are not learned, so that a rank needs no counts of other
        ranks. `Stepper` corrects for this when the counts of all ranks are known. Under tensor
        parallel every rank of a group has the same loss.
        """
        group = None
        if isinstance(weight_VD, DTensor):
            group = weight_VD.device_mesh.get_group()
            weight_VD = weight_VD.to_local()
        labels_N = labels_BT.flatten()
        train = self._train
        how = HeadLoss(
            scale=1 / self._tokens_per_step,
            z_weight=train.z_loss or 0.0,
            chunks=chunks_of_loss(train.loss_chunks, len(labels_N)),
            output_dtype=getattr(torch, train.output_dtype) if train.output_dtype else None,
            compute_dtype=_compute_dtype(weight_VD),
            group=group,
            recompute=self._recompute,
        )
        loss, sums = head_loss(hidden_BTD.flatten(0, 1), weight_VD, labels_N, how)
        self._loss += sums.loss
        self._tokens += (labels_N != NOT_LEARNED).sum()
        self._z_loss += sums.z_loss
        return loss

    def pop_sums(self) -> LossSums:
        """The sums since the last call."""
        sums = LossSums(self._loss, self._tokens, self._z_loss)
        self._reset()
        return sums


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Under autocast (DDP and ZeRO-1) the weights are wider than the products."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype

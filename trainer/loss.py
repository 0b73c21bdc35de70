"""The loss of next-token prediction, and its sums over the tokens that a rank sees in a step."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

NOT_LEARNED = -100
"""Label of a token that the loss leaves out."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Over this rank's learned tokens of a step."""

    loss: torch.Tensor
    """Sum of the cross-entropies, float64."""
    tokens: torch.Tensor
    """How many there are, float64."""


class TokenLoss:
    """Called with logits [batch, tokens, vocabulary] and labels [batch, tokens]; adds up."""

    def __init__(self, tokens_per_step: int, device: torch.device) -> None:
        """`tokens_per_step` pass through this rank in a step, learned or not."""
        self._tokens_per_step = tokens_per_step
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=self._device)

    def __call__(self, logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """What to go backward from: this micro batch's part of the mean over all tokens.

        The mean counts tokens that are not learned as well, so that a rank needs to know nothing of
        the others'; the step corrects for that once all have been counted.
        """
        loss = cross_entropy(
            logits_BTV.flatten(0, 1).float(),
            labels_BT.flatten(),
            ignore_index=NOT_LEARNED,
            reduction="sum",
        )
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        self._loss += whole.detach()
        self._tokens += (labels_BT != NOT_LEARNED).sum()
        return loss / self._tokens_per_step

    def take(self) -> LossSums:
        """The sums since the last call."""
        sums = LossSums(self._loss, self._tokens)
        self._reset()
        return sums

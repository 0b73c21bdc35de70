"""One optimizer step: forward and backward over the micro batches, the totals, and the update."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from trainer.data import Batches
from trainer.optimizer import clip, local_gradients, set_lr, squared_norm
from trainer.parallel.data import reduce_gradients_in_backward
from trainer.ranks import Ranks
from trainer.signals import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a step came to, the same on every rank."""

    loss: float
    grad_norm: float
    stop: bool
    """Some rank was asked to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    batches: Batches
    ranks: Ranks
    gradient_accumulation: int
    grad_clip: float | None

    def run(self, step: int, lr: float, stop: StopRequest) -> Totals:
        loss = self._forward_backward(step)
        parts = local_gradients(self.model)
        norm2 = squared_norm(parts, self.ranks.device)
        totals = _sum_over_ranks(loss, norm2, stop.asked)
        clip(parts, totals.grad_norm, self.grad_clip)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return totals

    def _forward_backward(self, step: int) -> torch.Tensor:
        """This rank's mean loss of the step; its gradient is left in the parameters."""
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for micro in range(self.gradient_accumulation):
            reduce_gradients_in_backward(self.model, micro == self.gradient_accumulation - 1)
            inputs_BT, labels_BT = self.batches.micro_batch(step, micro)
            with self._loss_context():
                loss = self._loss(inputs_BT.to(self.ranks.device), labels_BT.to(self.ranks.device))
                # Micro batches are equally long, so the mean of their means is the mean of all
                # tokens; and FSDP takes the mean over the data-parallel ranks.
                (loss / self.gradient_accumulation).backward()
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            total += loss.detach() / self.gradient_accumulation
        return total

    def _loss(self, inputs_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        # Given, because under sequence parallel the model sees a part of the sequence only.
        positions_1T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device).unsqueeze(0)
        logits_BTV = self.model(input_ids=inputs_BT, position_ids=positions_1T).logits
        return cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())

    def _loss_context(self) -> AbstractContextManager[None]:
        """Under tensor parallel logits are cut over the vocabulary, and the loss works on parts."""
        return loss_parallel() if self.ranks.mesh["tp"].size() > 1 else nullcontext()


def _sum_over_ranks(loss: torch.Tensor, norm2: torch.Tensor, stop: bool) -> Totals:
    """One collective for all that the ranks must agree on at the end of a step."""
    sums = torch.stack([loss, norm2, loss.new_tensor(float(stop))])
    dist.all_reduce(sums)
    loss_sum, norm2_sum, stops = sums.tolist()
    # Ranks that differ in tp have the same loss, so the mean over all ranks is that over the data.
    return Totals(loss=loss_sum / dist.get_world_size(), grad_norm=norm2_sum**0.5, stop=stops > 0)

"""One optimizer step: forward and backward over the micro batches, the totals, and the update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.batches import Batches
from trainer.gradients import clip_factor, local_gradients, scale, squared_norm
from trainer.loss import LossSums
from trainer.optimizer import set_lr
from trainer.passes import Passes
from trainer.ranks import Ranks
from trainer.signals import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a step came to, the same on every rank."""

    loss: float
    """Mean over the learned tokens of the global batch."""
    tokens: float
    """Learned tokens of the global batch."""
    grad_norm: float
    stop: bool
    """Some rank was asked to leave."""
    save_failed: bool
    """Some rank knows that the checkpoint being written has failed."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    parameters: Sequence[nn.Parameter]
    passes: Passes
    optimizer: torch.optim.Optimizer
    batches: Batches
    ranks: Ranks
    tokens_per_step: int
    """Of the global batch, learned or not."""
    grad_clip: float | None

    def run(self, step: int, lr: float, stop: StopRequest, save_failed: bool = False) -> Totals:
        sums = self.passes.train(self.batches.of_step(step))
        parts = local_gradients(self.parameters, self.ranks.stage_ranks)
        norm2 = squared_norm(parts, self.ranks.device)
        totals = self._total(sums, norm2, stop.asked, save_failed)
        if totals.finite:
            learned = self.tokens_per_step / totals.tokens
            scale(parts, learned * clip_factor(totals.grad_norm, self.grad_clip))
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return totals

    def _total(self, sums: LossSums, norm2: torch.Tensor, stop: bool, save_failed: bool) -> Totals:
        """One collective for all that the ranks must agree on at the end of a step."""
        told = norm2.new_tensor([float(stop), float(save_failed)])
        vector = torch.cat([torch.stack([sums.loss, sums.tokens, norm2]), told])
        dist.all_reduce(vector)
        loss, tokens, norm2_sum, stops, failures = vector.tolist()
        # Ranks that differ in tp alone have counted the same tokens.
        tokens, loss = tokens / self.ranks.tp, loss / self.ranks.tp
        learned = self.tokens_per_step / tokens if tokens else math.nan
        return Totals(
            loss=loss / tokens if tokens else math.nan,
            tokens=tokens,
            grad_norm=norm2_sum**0.5 * learned,
            stop=stops > 0,
            save_failed=failures > 0,
        )

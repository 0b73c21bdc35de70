"""One optimizer step: forward and backward over the micro batches, the totals, and the update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.ledger import SampleLedger, Sums
from trainer.data.loader import Loader
from trainer.gradients import clip_factor, local_gradients, not_finite, scale, squared_norm
from trainer.loss import LossSums
from trainer.measure.timing import Stopwatch
from trainer.optimizer import set_lr
from trainer.parallel.passes import Passes
from trainer.rank.ranks import Ranks
from trainer.rank.signals import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a step came to, the same on every rank but for `bad_gradients`."""

    loss: float
    """Mean over the learned tokens of the global batch; NaN when there is none."""
    z_loss: float
    """What z-loss adds to it."""
    tokens: float
    """Learned tokens of the global batch."""
    grad_norm: float
    stop: bool
    """Some rank was asked to leave."""
    save_failed: bool
    """Some rank knows that the checkpoint being written has failed."""
    every: int
    """Steps between two checkpoints from now on, as the first rank proposed; 0: as before."""
    read: Sums
    """Which samples all ranks together have read."""
    bad_gradients: Sequence[str] = ()
    """Parameters whose gradient is not finite, as far as this rank holds it."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss + self.z_loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    parameters: Sequence[tuple[str, nn.Parameter]]
    tied: Sequence[nn.Parameter]
    """Those of them that another stage has a copy of."""
    passes: Passes
    optimizer: torch.optim.Optimizer
    batches: Loader
    ranks: Ranks
    tokens_per_step: int
    """Of the global batch, learned or not."""
    grad_clip: float | None
    watch: Stopwatch
    ledger: SampleLedger | None = None
    """On rank 0."""

    def run(
        self, step: int, lr: float, stop: StopRequest, save_failed: bool = False, every: int = 0
    ) -> Totals:
        """Do `step`, counted from 1. An update that would spoil the model is left out, and then
        weights and optimizer are as they were, bit by bit, on every rank.

        The host waits for the device once, where it reads the totals.
        """
        with self.watch.host_part("data"):
            batches = self.batches.of_step(step)
        with self.watch.part("passes"):
            sums = self.passes.train(batches)
        parts = local_gradients((p for _, p in self.parameters), self.ranks.stage_ranks, self.tied)
        norm2 = squared_norm(parts, self.ranks.device)
        totals = self._total(sums, norm2, stop.asked, save_failed, every)
        self.watch.leaves()
        with self.watch.part("optimizer"):
            if totals.finite:
                clip = clip_factor(totals.grad_norm, self.grad_clip)
                scale(parts, self._learned(totals.tokens) * clip)
                set_lr(self.optimizer, lr)
                self.optimizer.step()
            elif totals.tokens:
                totals = replace(totals, bad_gradients=not_finite(self.parameters))
            self.optimizer.zero_grad()
        if self.ledger is not None:
            self.ledger.append(step, totals.read)
        return totals

    def _total(
        self, sums: LossSums, norm2: torch.Tensor, stop: bool, save_failed: bool, every: int
    ) -> Totals:
        """One collective for all that the ranks must agree on at the end of a step."""
        counts = torch.stack([sums.loss, sums.z_loss, sums.tokens, norm2])
        # Filled in place: a tensor made of Python numbers would make the host wait for its copy.
        told = torch.zeros(3 + len(Sums._fields), dtype=torch.float64, device=norm2.device)
        for place, number in enumerate(
            (float(stop), float(save_failed), float(every), *self.batches.read)
        ):
            told[place] = number
        vector = torch.cat([counts, told])
        dist.all_reduce(vector)
        loss, z_loss, tokens, norm2_sum, stops, failures, wanted, *read = vector.tolist()
        # Ranks that differ in tp alone have counted the same tokens.
        loss, z_loss, tokens = (value / self.ranks.tp for value in (loss, z_loss, tokens))
        return Totals(
            loss=loss / tokens if tokens else math.nan,
            z_loss=z_loss / tokens if tokens else math.nan,
            tokens=tokens,
            grad_norm=norm2_sum**0.5 * self._learned(tokens),
            stop=stops > 0,
            every=int(wanted),
            read=Sums(*read),
            save_failed=failures > 0,
        )

    def _learned(self, tokens: float) -> float:
        """What makes a mean over all tokens one over the `tokens` that are learned."""
        return self.tokens_per_step / tokens if tokens else math.nan

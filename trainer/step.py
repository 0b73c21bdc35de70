"""One optimizer step: forward and backward over all micro batches, totals, parameter update."""

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
    """The result of a step. It is the same on every rank, except `bad_gradients`."""

    loss: float
    """Mean over the learned tokens of the global batch; NaN if there are none."""
    z_loss: float
    """The share of z-loss in `loss`."""
    tokens: float
    """Learned tokens of the global batch."""
    grad_norm: float
    stop: bool
    """At least one rank was asked to stop."""
    save_failed: bool
    """On at least one rank the current checkpoint save has failed."""
    every: int
    """New checkpoint interval in steps, proposed by rank 0; 0: unchanged."""
    read: Sums
    """Checksums of the samples that all ranks together have read."""
    bad_gradients: Sequence[str] = ()
    """Parameters with a gradient that is not finite in this rank's shard."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss + self.z_loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    parameters: Sequence[tuple[str, nn.Parameter]]
    tied: Sequence[nn.Parameter]
    """Parameters that another pipeline stage also holds (tied embeddings)."""
    passes: Passes
    optimizer: torch.optim.Optimizer
    batches: Loader
    ranks: Ranks
    tokens_per_step: int
    """Tokens of the global batch, including masked ones."""
    grad_clip: float | None
    watch: Stopwatch
    ledger: SampleLedger | None = None
    """None except on rank 0."""

    def run(
        self, step: int, lr: float, stop: StopRequest, save_failed: bool = False, every: int = 0
    ) -> Totals:
        """Run `step`, counted from 1.

        If the loss or the gradient norm is not finite, the update is skipped: weights and optimizer
        state then stay bit-identical on every rank. The host waits for the device only once, when
        it reads the totals.
        """
        with self.watch.host_part("data"):
            batches = self.batches.of_step(step)
        with self.watch.part("passes"):
            sums = self.passes.train(batches)
        parts = local_gradients((p for _, p in self.parameters), self.ranks.stage_ranks, self.tied)
        norm2 = squared_norm(parts, self.ranks.device)
        totals = self._total(sums, norm2, stop.asked, save_failed, every)
        self.watch.after_collective()
        with self.watch.part("optimizer"):
            # All ranks take the same branch, because the totals are the same on every rank. The
            # optimizer step may be collective, so a rank on its own must not skip it.
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
        """Sum all values that the ranks must agree on, in one all-reduce at the end of the step."""
        counts = torch.stack([sums.loss, sums.z_loss, sums.tokens, norm2])
        # Filled in place, because `torch.tensor` of Python numbers would wait for its copy.
        flags = torch.zeros(3 + len(Sums._fields), dtype=torch.float64, device=norm2.device)
        for place, number in enumerate(
            (float(stop), float(save_failed), float(every), *self.batches.read)
        ):
            flags[place] = number
        vector = torch.cat([counts, flags])
        dist.all_reduce(vector)
        loss, z_loss, tokens, norm2_sum, stops, failures, wanted, *read = vector.tolist()
        # All tp ranks of a group have counted the same tokens.
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
        """Factor from a mean over all tokens to a mean over the learned `tokens`."""
        return self.tokens_per_step / tokens if tokens else math.nan

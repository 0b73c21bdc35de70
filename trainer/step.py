"""One optimizer step: forward and backward over all micro batches, totals, parameter update."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.ledger import Sums
from trainer.data.loader import Loader
from trainer.gradients import (
    Parts,
    clip_factor,
    clip_factor_on_device,
    local_gradients,
    part_norms,
    scale,
    scale_on_device,
    squared_norm,
)
from trainer.loss import LossSums
from trainer.measure.timing import Stopwatch
from trainer.optimizer import set_lr, update_if, update_threads
from trainer.parallel.passes import Passes
from trainer.rank.ranks import Ranks
from trainer.rank.signals import StopRequest

Norms = Sequence[tuple[str, torch.Tensor]]
"""Names of parameters, and the norms of their gradients in this rank's shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What this rank tells all others about its checkpoints, in the totals of a step."""

    save_failed: bool = False
    """The current save to the disk has failed."""
    every: int = 0
    """New interval of saves to the disk, from rank 0; 0: unchanged."""
    remembered: bool = True
    """The last checkpoint in memory is complete, or there is none."""
    remember_every: int = 0
    """New interval of checkpoints in memory, from rank 0; 0: unchanged."""
    share_ended: bool = True
    """No copy of a checkpoint in memory is being sent to partner hosts."""
    share_failed: bool = False
    """The last one did not arrive."""
    forgets: bool = False
    """This rank can keep no checkpoints in memory any more."""


NO_NEWS = News()


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
    remembered: bool
    """Every rank has completed its last checkpoint in memory."""
    remember_every: int
    """New interval of checkpoints in memory, proposed by rank 0; 0: unchanged."""
    share_ended: bool
    """The agents of all ranks have ended sending copies to partner hosts."""
    share_failed: bool
    """At least one copy did not arrive."""
    forgets: bool = False
    """Some rank can keep no checkpoints in memory any more, so none does."""
    read: Sums
    """Checksums of the samples that all ranks together have read."""
    stop_on_disk: bool = True
    """If `stop`: a checkpoint on the disk is required. Ranks not asked yet have no say."""
    save: bool = False
    """At least one rank was asked to save a checkpoint to the disk."""
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
    update_threads: int = 1
    """Threads of the update. More than one only helps on the host's memory."""

    def run(self, step: int, lr: float, stop: StopRequest, news: News = NO_NEWS) -> Totals:
        """Run `step`, counted from 1.

        If the loss or the gradient norm is not finite, the update is skipped: weights and optimizer
        state then stay bit-identical on every rank. The host waits for the device only once, when
        it reads the totals.
        """
        parts, norms, vector = self._pass(step, stop, news)
        totals = self._totals(vector.tolist(), norms)
        self.watch.after_collective()
        with self.watch.part("optimizer"):
            # All ranks take the same branch, because the totals are the same on every rank. The
            # optimizer step may be collective, so a rank on its own must not skip it.
            if totals.finite:
                clip = clip_factor(totals.grad_norm, self.grad_clip)
                scale(parts, self._learned(totals.tokens) * clip)
                set_lr(self.optimizer, lr)
                with update_threads(self.update_threads):
                    self.optimizer.step()
            self.optimizer.zero_grad()
        return totals

    def read_at_once(
        self, step: int, lr: float, stop: StopRequest, news: News = NO_NEWS
    ) -> Callable[[], Totals]:
        """`run`, with the answer of `queue`."""
        totals = self.run(step, lr, stop, news)
        return lambda: totals

    def queue(
        self, step: int, lr: float, stop: StopRequest, news: News = NO_NEWS
    ) -> Callable[[], Totals]:
        """`run` without waiting: the device decides whether it applies the update, by the same
        rule and with the same bits. Returns a function that waits for the totals.

        The optimizer must be one of `SKIP_ON_DEVICE`.
        """
        parts, norms, vector = self._pass(step, stop, news)
        read = _copy_to_host(vector)
        self.watch.after_collective()
        with self.watch.part("optimizer"):
            loss, z_loss, tokens, norm2 = vector[:4].unbind()
            tokens = tokens / self.ranks.tp
            # Not `number / tensor`, which is a product with the reciprocal, so with other bits.
            learned = torch.full_like(tokens, self.tokens_per_step) / tokens
            norm = norm2.sqrt() * learned
            # A batch without a token to learn divides by zero here, so it is skipped too.
            finite = torch.isfinite(loss / tokens + z_loss / tokens) & torch.isfinite(norm)
            scale_on_device(parts, learned * clip_factor_on_device(norm, self.grad_clip))
            set_lr(self.optimizer, lr)
            update_if(finite, self.optimizer)
            self.optimizer.zero_grad()
        return lambda: self._totals(read(), norms)

    def _pass(self, step: int, stop: StopRequest, news: News) -> tuple[Parts, Norms, torch.Tensor]:
        """Forward, backward, and the sums over all ranks: this rank's gradients, and what `_totals`
        reads."""
        with self.watch.host_part("data"):
            batches = self.batches.of_step(step)
        with self.watch.part("passes"):
            sums = self.passes.train(batches)
        parts = local_gradients((p for _, p in self.parameters), self.ranks.stage_ranks, self.tied)
        norms = part_norms(parts)
        norm2 = squared_norm(parts, norms, self.ranks.device)
        names = (name for name, parameter in self.parameters if parameter.grad is not None)
        named = list(zip(names, norms, strict=True))
        return parts, named, self._sum(sums, norm2, stop, news)

    def _sum(
        self, sums: LossSums, norm2: torch.Tensor, stop: StopRequest, news: News
    ) -> torch.Tensor:
        """Sum all values that the ranks must agree on, in one all-reduce at the end of the step."""
        counts = torch.stack([sums.loss, sums.z_loss, sums.tokens, norm2])
        # Filled in place, because `torch.tensor` of Python numbers would wait for its copy.
        numbers = (stop.asked, news.save_failed, news.every, news.remembered, news.remember_every)
        shares = (news.share_ended, news.share_failed, news.forgets, stop.on_disk, stop.save)
        values = (*map(float, (*numbers, *shares)), *self.batches.read)
        rest = torch.zeros(len(values), dtype=torch.float64, device=norm2.device)
        for place, value in enumerate(values):
            rest[place] = value
        vector = torch.cat([counts, rest])
        dist.all_reduce(vector)
        return vector

    def _totals(self, vector: Sequence[float], norms: Norms) -> Totals:
        loss, z_loss, tokens, norm2_sum, stops, failures, wanted, *rest = vector
        remembered, remember_every, share_ended, share_failed, forgets, on_disk, save, *read = rest
        # All tp ranks of a group have counted the same tokens.
        loss, z_loss, tokens = (value / self.ranks.tp for value in (loss, z_loss, tokens))
        totals = Totals(
            loss=loss / tokens if tokens else math.nan,
            z_loss=z_loss / tokens if tokens else math.nan,
            tokens=tokens,
            grad_norm=_root(norm2_sum) * self._learned(tokens),
            stop=stops > 0,
            every=int(wanted),
            remembered=remembered == self.ranks.env.world_size,
            remember_every=int(remember_every),
            share_ended=share_ended == self.ranks.env.world_size,
            share_failed=share_failed > 0,
            forgets=forgets > 0,
            stop_on_disk=on_disk > 0,
            save=save > 0,
            read=Sums(*read),
            save_failed=failures > 0,
        )
        if totals.finite or not tokens:
            return totals
        bad = [name for name, norm in norms if not math.isfinite(norm.item())]
        return replace(totals, bad_gradients=bad)

    def _learned(self, tokens: float) -> float:
        """Factor from a mean over all tokens to a mean over the learned `tokens`."""
        return self.tokens_per_step / tokens if tokens else math.nan


def _root(squared: float) -> float:
    # Exactly rounded, as on the device, which `**0.5` is not. `math.sqrt` refuses no NaN.
    return math.sqrt(squared)


def _copy_to_host(vector: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy `vector`; the function that is returned waits for the copy alone, not for what
    is queued after it."""
    if vector.device.type != "cuda":
        return vector.tolist
    host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
    host.copy_(vector, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        values: list[float] = host.tolist()
        return values

    return read

"""Computes the loss on held-out data between two steps. It does not change the training state."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.batches import Batches
from trainer.parallel.passes import Passes
from trainer.rank.reporter import Reporter

LOG = logging.getLogger("trainer")


@dataclass(frozen=True, slots=True)
class Evaluation:
    loss: float | None
    """Mean over the learned tokens; None if there were none."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    every: int
    """Steps between two evaluations."""
    sequences: int | None
    data: Batches
    passes: Passes
    stages: Sequence[nn.Module]
    device: torch.device
    reporter: Reporter

    def due(self, step: int, last: int) -> bool:
        return step % self.every == 0 or step == last

    def run(self) -> Evaluation:
        """Evaluate. All ranks must call it, and all get the same loss."""
        begun = time.perf_counter()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        with _evaluating(self.stages):
            for batches in self.data.evaluation(self.sequences):
                self.reporter.beat("eval")
                sums = self.passes.evaluate(batches)
                totals += torch.stack([sums.loss, sums.tokens])
        dist.all_reduce(totals)
        # The tp ranks of a group counted the same tokens, so both sums are tp times too large.
        loss, tokens = totals.tolist()
        if not tokens and self.reporter.env.rank == 0:
            LOG.warning("evaluation after step %d had no token to learn", self.reporter.step)
        return Evaluation(loss / tokens if tokens else None, time.perf_counter() - begun)


@contextmanager
def _evaluating(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Switches dropout off inside."""
    for stage in stages:
        stage.eval()
    yield
    for stage in stages:
        stage.train()

"""The loss on held-out data, between two steps, leaving training as it was."""

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
from trainer.rank.emit import Reporter

LOG = logging.getLogger("trainer")


@dataclass(frozen=True, slots=True)
class Evaluation:
    loss: float | None
    """Mean over the tokens; None when there was none."""
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
        """Evaluate; every rank must call it, and all get the same loss."""
        begun = time.perf_counter()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        with _evaluating(self.stages):
            for batches in self.data.evaluation(self.sequences):
                self.reporter.beat("eval")
                sums = self.passes.evaluate(batches)
                totals += torch.stack([sums.loss, sums.tokens])
        dist.all_reduce(totals)
        # Ranks that differ in tp alone have counted the same tokens: the ratio does not feel it.
        loss, tokens = totals.tolist()
        if not tokens and self.reporter.env.rank == 0:
            LOG.warning("the evaluation after step %d had no token to predict", self.reporter.step)
        return Evaluation(loss / tokens if tokens else None, time.perf_counter() - begun)


@contextmanager
def _evaluating(stages: Sequence[nn.Module]) -> Iterator[None]:
    """No dropout meanwhile."""
    for stage in stages:
        stage.eval()
    yield
    for stage in stages:
        stage.train()

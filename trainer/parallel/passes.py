"""Forward and backward over the micro batches of a step, without a pipeline.

`parallel/pipeline.py` implements `Passes` for a pipeline.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from trainer.data.batches import MicroBatch
from trainer.loss import LossSums, TokenLoss
from trainer.measure.timing import Stopwatch
from trainer.model.decoder import Decoder
from trainer.parallel.data import finish_reducing_gradients, reduce_gradients_in_backward


class Passes(Protocol):
    def train(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward. Leaves gradients, averaged over data ranks, in the parameters."""

    def evaluate(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward only."""


class WholeModel:
    def __init__(
        self, decoder: Decoder, loss: TokenLoss, watch: Stopwatch, forward_alone: bool = False
    ) -> None:
        self._decoder = decoder
        decoder.loss = loss
        self._loss = loss
        self._watch = watch
        self._forward_alone = forward_alone
        """Only the last backward pass of a step communicates."""

    def train(self, batches: Sequence[MicroBatch]) -> LossSums:
        if not self._forward_alone:
            self._watch.before_collective()
        for number, batch in enumerate(batches, start=1):
            reduce_gradients_in_backward(self._decoder, number == len(batches))
            with self._watch.part("forward"):
                loss = self._decoder(batch.inputs_BT, batch.labels_BT, batch.documents)
            if number == len(batches):
                self._watch.before_collective()
            with self._watch.part("backward"):
                loss.backward()
        finish_reducing_gradients(self._decoder)
        return self._loss.pop_sums()

    def evaluate(self, batches: Sequence[MicroBatch]) -> LossSums:
        with torch.no_grad():
            for batch in batches:
                self._decoder(batch.inputs_BT, batch.labels_BT, batch.documents)
        free_gathered(self._decoder)
        return self._loss.pop_sums()


def free_gathered(decoder: Decoder) -> None:
    """Free the weights that FSDP keeps gathered for a backward pass, which an evaluation does not
    have. Otherwise a checkpoint would find them in place of the shards."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

"""Forward and backward over the micro batches of a step, where one rank has the whole model.

With a pipeline, `parallel/pipeline.py` has its own `Passes`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from trainer.data.batches import MicroBatch
from trainer.loss import LossSums, TokenLoss
from trainer.measure.timing import Stopwatch
from trainer.model.decoder import Decoder
from trainer.parallel.data import finish_reducing_gradients, reduce_gradients_in_backward


class Passes(Protocol):
    def train(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward and backward; gradients are left in the parameters, averaged over data ranks."""

    def evaluate(self, batches: Sequence[MicroBatch]) -> LossSums:
        """Forward alone."""


class WholeModel:
    def __init__(
        self,
        decoder: Decoder,
        loss: TokenLoss,
        tensor_parallel: bool,
        watch: Stopwatch,
        forward_alone: bool = False,
    ) -> None:
        self._decoder = decoder
        self._loss = loss
        self._tensor_parallel = tensor_parallel
        self._watch = watch
        self._forward_alone = forward_alone
        """A forward pass needs no other rank, nor does any backward pass but a step's last."""

    def train(self, batches: Sequence[MicroBatch]) -> LossSums:
        if not self._forward_alone:
            self._watch.enters()
        for number, batch in enumerate(batches, start=1):
            reduce_gradients_in_backward(self._decoder, number == len(batches))
            with loss_context(self._tensor_parallel):
                with self._watch.part("forward"):
                    loss = self._loss(self._decoder(batch.inputs_BT), batch.labels_BT)
                if number == len(batches):
                    self._watch.enters()
                with self._watch.part("backward"):
                    loss.backward()
        finish_reducing_gradients(self._decoder)
        return self._loss.take()

    def evaluate(self, batches: Sequence[MicroBatch]) -> LossSums:
        with torch.no_grad(), loss_context(self._tensor_parallel):
            for batch in batches:
                self._loss(self._decoder(batch.inputs_BT), batch.labels_BT)
        free_gathered(self._decoder)
        return self._loss.take()


def free_gathered(decoder: Decoder) -> None:
    """Free the weights that FSDP gathered for a forward pass and keeps for a backward pass that
    does not come: as long as it does, a checkpoint finds them in the place of the shards."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def loss_context(tensor_parallel: bool) -> AbstractContextManager[None]:
    """Under tensor parallel logits are cut over the vocabulary, and the loss works on parts."""
    return loss_parallel() if tensor_parallel else nullcontext()

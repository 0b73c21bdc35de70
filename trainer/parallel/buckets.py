"""Averages gradients over ranks with copies of the weights, while the backward pass is running.

As torch's DistributedDataParallel does, with two differences that keep it from being used here: a
parameter may be a DTensor, cut over the ranks of axis tp (DDP takes plain tensors only), and
gradients may come from a pipeline schedule that computes them outside of autograd's accumulation
(zero bubble does), which DDP would never notice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.model.decoder import Decoder
from trainer.model.regions import local_part

BUCKET_BYTES = 25 * 2**20
"""Large enough for a network's full speed, small enough to start long before backward ends."""

Exchange = Callable[[Sequence[nn.Parameter]], Callable[[], None]]
"""Starts to average the gradients of some parameters; what it returns waits for the outcome and
puts it in place."""


@dataclass(slots=True)
class Bucket:
    parameters: list[nn.Parameter]
    missing: int
    """Gradients that this backward pass has yet to compute."""


class Buckets:
    """The gradients of one decoder. Its parameters are looked up at the first backward pass: giving
    a module storage makes new ones."""

    def __init__(self, decoder: Decoder, exchange: Exchange) -> None:
        self._decoder = decoder
        self._exchange = exchange
        self._buckets: list[Bucket] = []
        self._last = False
        self._started: list[Callable[[], None]] = []

    def in_backward(self, last: bool) -> None:
        self._set_up()
        self._last = last

    def _set_up(self) -> None:
        if self._buckets:
            return
        for parameters in bucketed(trained(self._decoder)):
            bucket = Bucket(parameters, len(parameters))
            self._buckets.append(bucket)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, bucket=bucket: self._computed(bucket)
                )

    def _computed(self, bucket: Bucket) -> None:
        if not self._last:
            return
        bucket.missing -= 1
        # In the one order that all ranks keep, whichever bucket is complete first.
        while self._waiting and not self._waiting[0].missing:
            self._start(self._waiting[0])

    @property
    def _waiting(self) -> list[Bucket]:
        return self._buckets[len(self._started) :]

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._started.append(self._exchange(bucket.parameters))

    @torch.no_grad()
    def finish(self) -> None:
        self._set_up()
        for bucket in self._waiting:
            self._start(bucket)
        for wait in self._started:
            wait()
        self._started.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)


def trained(decoder: Decoder) -> list[nn.Parameter]:
    return [parameter for parameter in decoder.parameters() if parameter.requires_grad]


def bucketed(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups of at least `BUCKET_BYTES`, but for the last; backward comes to them in this order."""
    groups: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in reversed(list(parameters)):
        if size >= BUCKET_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        local = local_part(parameter)
        size += local.numel() * local.element_size()
    return groups if groups[0] else []

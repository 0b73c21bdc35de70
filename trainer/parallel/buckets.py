"""Averages gradients over replicas in buckets, while the backward pass is running.

torch's DistributedDataParallel does the same, but it supports only plain tensors, and here a
parameter may be a DTensor that is sharded over tp. Nor does it see gradients that a zero-bubble
pipeline schedule computes outside of autograd's accumulation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.model.decoder import Decoder
from trainer.model.regions import local_part

BUCKET_BYTES = 25 * 2**20
"""Large enough for full network bandwidth, small enough to start long before backward ends."""

Exchange = Callable[[Sequence[nn.Parameter]], Callable[[], None]]
"""Starts to average the gradients of some parameters, and frees them: the buffer that is reduced
replaces them. Returns a function that waits for the result and stores it in the parameters."""


@dataclass(slots=True)
class Bucket:
    parameters: list[nn.Parameter]
    missing: int
    """Gradients that the backward pass has not computed yet."""


class Buckets:
    """The gradient buckets of one decoder. They are built at the first backward pass, because
    allocating a module replaces its parameters."""

    def __init__(self, decoder: Decoder, exchange: Exchange) -> None:
        self._decoder = decoder
        self._exchange = exchange
        self._buckets: list[Bucket] = []
        self._last = False
        self._num_started = 0
        self._waiting: list[Callable[[], None]] = []

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
        # All ranks must start collectives in the same order, so a complete bucket waits for the
        # ones before it.
        while self._not_started and not self._not_started[0].missing:
            self._start(self._not_started[0])

    @property
    def _not_started(self) -> list[Bucket]:
        return self._buckets[self._num_started :]

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            # Other ranks may have a gradient for a parameter that this rank did not use.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._num_started += 1
        self._waiting.append(self._exchange(bucket.parameters))

    @torch.no_grad()
    def finish(self) -> None:
        self._set_up()
        for bucket in self._not_started:
            self._start(bucket)
        while self._waiting:
            # Each function holds a buffer, so it is dropped at once.
            self._waiting.pop(0)()
        self._num_started = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)


def trained(decoder: Decoder) -> list[nn.Parameter]:
    """In the order of the forward pass, while a decoder stores its embeddings after its layers."""
    family = decoder.family
    paths = (family.embedding, family.positions) if decoder.part.is_first else ()
    modules = [decoder.get_submodule(path) for path in paths if path]
    embeddings = [parameter for module in modules for parameter in module.parameters()]
    # A tied head is the embedding, whose gradient is complete at the end of the backward pass.
    found = dict.fromkeys([*embeddings, *decoder.parameters()])
    return [parameter for parameter in found if parameter.requires_grad]


def bucketed(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Groups of parameters, in the order in which the backward pass completes them.

    A parameter of at least `BUCKET_BYTES` is alone, so that its gradient is reduced where it is.
    Smaller ones share a buffer of at least that size, except the last.
    """
    groups: list[list[nn.Parameter]] = []
    small: list[nn.Parameter] = []
    filled = 0
    for parameter in reversed(list(parameters)):
        local = local_part(parameter)
        size = local.numel() * local.element_size()
        if size >= BUCKET_BYTES:
            groups.append([parameter])
            continue
        small.append(parameter)
        filled += size
        if filled >= BUCKET_BYTES:
            groups.append(small)
            small, filled = [], 0
    return [*groups, small] if small else groups


def set_gradient(parameter: nn.Parameter, local: torch.Tensor) -> None:
    """Make `local` this rank's part of the gradient of `parameter`. The memory is shared if the
    types are equal."""
    local = local.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    parameter.grad = local

"""Data parallel: ranks that read different tokens, and what of the model each of them holds.

`fsdp` shards weights, gradients and moments (`fsdp.py`); `ddp` copies all three (`ddp.py`); `zero1`
copies weights and shards the moments (`zero1.py`). What the rest of the trainer needs to know of
them is here.
"""

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import nn

from orchestrator.contract.spec.parallel_spec import ParallelSpec
from orchestrator.contract.spec.train_spec import TrainSpec
from trainer.model.decoder import Decoder
from trainer.parallel.ddp import apply_ddp, autocast
from trainer.parallel.fsdp import apply_fsdp
from trainer.parallel.zero1 import apply_zero1, gather_whole, make_shards, shard_of
from trainer.rank.ranks import Ranks


class Reduction(Protocol):
    """How one decoder's gradients are averaged over the data-parallel ranks."""

    def in_backward(self, last: bool) -> None:
        """See `reduce_gradients_in_backward`."""

    def finish(self) -> None:
        """See `finish_reducing_gradients`."""


def apply_data_parallel(
    decoder: Decoder, ranks: Ranks, parallel: ParallelSpec, train: TrainSpec
) -> None:
    """Share `decoder`, which has no storage yet, among the data-parallel ranks.

    Raises:
        TrainingError: where `parallel.fsdp.wrap` names no module of the decoder layers.
    """
    reduction: Reduction | None
    if parallel.data == "fsdp":
        reduction = apply_fsdp(decoder, ranks, parallel.fsdp, train)
    else:
        autocast(decoder, ranks.device, train.dtype)
        alike = apply_ddp if parallel.data == "ddp" else apply_zero1
        reduction = alike(decoder, ranks, train.reduce_dtype)
    if train.output_dtype is not None and decoder.part.is_last:
        output_dtype = getattr(torch, train.output_dtype)
        decoder.register_forward_hook(lambda _module, _inputs, logits: logits.to(output_dtype))
    # A plain attribute, for a module would take anything else for a part of itself.
    object.__setattr__(decoder, "reduction", reduction)


def reduce_gradients_in_backward(decoder: Decoder, last: bool) -> None:
    """Say before each backward pass of a step whether it is the `last`.

    Gradients of the others stay where they are computed, and no rank talks to another about them;
    in the last one they are averaged, a part of the model at a time. A pipeline, whose schedule has
    the order of backward passes, does without: torch's schedules tell FSDP themselves, and the rest
    is averaged by `finish_reducing_gradients`.
    """
    if reduction := _reduction(decoder):
        reduction.in_backward(last)


def finish_reducing_gradients(decoder: Decoder) -> None:
    """To be called after the last backward pass of a step, before gradients are read."""
    if reduction := _reduction(decoder):
        reduction.finish()


def _reduction(decoder: Decoder) -> Reduction | None:
    return cast("Reduction | None", getattr(decoder, "reduction", None))


def parameters_to_update(decoder: Decoder) -> list[tuple[str, nn.Parameter]]:
    """What the optimizer of this rank works on, under plain names: the parameters that are trained,
    or under ZeRO-1 parts of them."""
    make_shards(decoder)
    named = decoder.plain_parameters()
    return [(name, updated_as(parameter)) for name, parameter in named if parameter.requires_grad]


def updated_as(parameter: nn.Parameter) -> nn.Parameter:
    """Under which parameter the optimizer has the state of `parameter`."""
    shard = shard_of(parameter)
    return parameter if shard is None else shard


def gather_after_step(optimizer: torch.optim.Optimizer, decoders: Iterable[Decoder]) -> None:
    """Under ZeRO-1 give every rank, after each of the optimizer's steps, what others updated."""
    for decoder in decoders:
        if gather := gather_whole(decoder):
            optimizer.register_step_post_hook(lambda *_, gather=gather: gather())

"""Data parallel: the common interface of its three strategies.

`fsdp` shards weights, gradients and moments (`fsdp.py`). `ddp` replicates all three (`ddp.py`).
`zero1` replicates weights and shards moments (`zero1.py`).
"""

from collections.abc import Iterable

import torch
from torch import nn

from orchestrator.contract.spec.parallel_spec import ParallelSpec
from orchestrator.contract.spec.train_spec import TrainSpec
from trainer.model.decoder import Decoder, Reduction
from trainer.parallel.ddp import apply_ddp, autocast
from trainer.parallel.fsdp import apply_fsdp
from trainer.parallel.zero1 import apply_zero1, gather_whole, make_shards, shard_of
from trainer.rank.ranks import Ranks


def apply_data_parallel(
    decoder: Decoder, ranks: Ranks, parallel: ParallelSpec, train: TrainSpec
) -> None:
    """Distribute `decoder`, which has no storage yet, over the data-parallel ranks.

    Raises:
        TrainingError: `parallel.fsdp.wrap` names no module class of the decoder layers.
    """
    reduction: Reduction | None
    if parallel.data == "fsdp":
        reduction = apply_fsdp(decoder, ranks, parallel.fsdp, train)
    else:
        autocast(decoder, train.compute_dtype)
        apply = apply_ddp if parallel.data == "ddp" else apply_zero1
        reduction = apply(decoder, ranks, train.reduce_dtype)
    decoder.reduction = reduction


def reduce_gradients_in_backward(decoder: Decoder, last: bool) -> None:
    """Call it before each backward pass of a step; `last` is true for the last one.

    DDP and ZeRO-1 accumulate gradients locally, without communication, until the last pass averages
    them, bucket by bucket. FSDP does so too, or reduces in each pass (`FsdpSpec.reduce_gradients`).
    With a pipeline `last` is always false: its stages tell FSDP themselves, and
    `finish_reducing_gradients` averages the rest.
    """
    if decoder.reduction:
        decoder.reduction.in_backward(last)


def finish_reducing_gradients(decoder: Decoder) -> None:
    """Call it after the last backward pass of a step, before gradients are used."""
    if decoder.reduction:
        decoder.reduction.finish()


def parameters_to_update(decoder: Decoder) -> list[tuple[str, nn.Parameter]]:
    """The parameters of this rank's optimizer, by plain name: all trained parameters, or this
    rank's shards of them under ZeRO-1."""
    make_shards(decoder)
    named = decoder.plain_parameters()
    return [(name, updated_as(parameter)) for name, parameter in named if parameter.requires_grad]


def updated_as(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter whose optimizer state belongs to `parameter`: its shard under ZeRO-1."""
    shard = shard_of(parameter)
    return parameter if shard is None else shard


def gather_after_step(optimizer: torch.optim.Optimizer, decoders: Iterable[Decoder]) -> None:
    """Under ZeRO-1, gather the updated shards of all ranks after each optimizer step."""
    for decoder in decoders:
        if gather := gather_whole(decoder):
            optimizer.register_step_post_hook(lambda *_, gather=gather: gather())

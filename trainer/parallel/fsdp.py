"""FSDP2: weights, gradients and moments are sharded, and each unit's weights gathered for its use.

With axis dp_replicate the shards are copied (HSDP). Ranks of axis cp share one set of shards: they
pass other tokens through the same weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fully_shard as internals
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from orchestrator.contract.spec.parallel_spec import FsdpSpec
from orchestrator.contract.spec.train_spec import TrainSpec
from orchestrator.errors import TrainingError
from trainer.model.decoder import Decoder
from trainer.model.quantize import unsharded
from trainer.rank.ranks import Ranks, joined

MESH_MAKER = "_get_post_forward_mesh_info"
"""What torch's `fully_shard` makes the mesh of a `reshard_after_forward` that is a number with."""

LARGE = 2**25
"""Parameters from which embedding and head are gathered for their own use only. Below that, one
more collective takes longer than their memory is worth."""


class ShardedGradients:
    def __init__(self, decoder: FSDPModule, reshard_between: bool) -> None:
        self._decoder = decoder
        self._reshard_between = reshard_between

    def in_backward(self, last: bool) -> None:
        self._decoder.set_is_last_backward(last)
        self._decoder.set_requires_gradient_sync(last)
        # Weights that stay after the forward pass may stay until the step's last backward pass.
        self._decoder.set_reshard_after_backward(last or self._reshard_between)

    def finish(self) -> None:
        """The backward pass has done all."""


def apply_fsdp(
    decoder: Decoder, ranks: Ranks, spec: FsdpSpec, train: TrainSpec
) -> ShardedGradients | None:
    """One rank that computes in the master weights' own type is left unsharded; bfloat16 needs FSDP
    even there, for it is what keeps float32 weights beside the ones computed with."""
    replicas, shards = ranks.mesh["dp_replicate"], ranks.shards
    units = wrap_units(decoder, spec.wrap)
    alone = replicas.size() * shards.size() == 1
    if alone and train.dtype == "float32" and not spec.cpu_offload:
        return None
    common: dict[str, Any] = {
        "mesh": joined(replicas, shards) if replicas.size() > 1 else shards,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if train.dtype == "float32" else getattr(torch, train.dtype),
            reduce_dtype=getattr(torch, train.reduce_dtype),
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        if spec.cpu_offload
        else OffloadPolicy(),
        "ignored_params": unsharded(decoder, shards.size()),
    }
    reshard = spec.reshard
    with resharding_over(shards, reshard):
        before, after = outer_units(decoder)
        ordered = [*before, *([unit] for unit in units), *after]
        for unit in ordered:
            # Backward begins with the last one: freed, it would be gathered at once.
            kept = unit is ordered[-1]
            fully_shard(unit, reshard_after_forward=False if kept else reshard, **common)
        fully_shard(decoder, reshard_after_forward=False, **common)
    root = cast(FSDPModule, decoder)
    prefetch(root, [cast(FSDPModule, unit[0]) for unit in ordered], spec)
    if ranks.device.type == "cpu":
        # There are no streams, and what is gathered ahead would be waited for on the spot.
        root._set_unshard_async_op(True)
    return ShardedGradients(root, reshard_between=reshard is not False)


def wrap_units(decoder: Decoder, wrap: str) -> list[nn.Module]:
    """The modules to gather one at a time, in the order of their use.

    Raises:
        TrainingError: when there is no module of class `wrap` with parameters in the decoder
            layers, on whichever stage.
    """
    layers = list(decoder.layers.values())
    if wrap in ("auto", decoder.family.layer_class):
        return layers
    there: dict[str, list[nn.Module]] = {}
    for module in (module for layer in layers for module in layer.modules()):
        if any(True for _ in module.parameters()):
            there.setdefault(type(module).__name__, []).append(module)
    if wrap not in there:
        names = ", ".join(sorted({decoder.family.layer_class, *there} - {"CheckpointWrapper"}))
        raise TrainingError(
            f"parallel.fsdp.wrap: no module of the decoder layers is a {wrap}",
            fix=f"choose one of {names}, or auto",
        )
    return there[wrap]


def outer_units(decoder: Decoder) -> tuple[list[list[nn.Module]], list[list[nn.Module]]]:
    """What is worth units of its own before and after the layers; the rest belongs to the root."""
    if decoder.tied:
        return [], []  # one parameter cannot be in two units
    before, after = decoder.embedding, decoder.head
    norm = decoder.get_submodule(decoder.family.norm) if decoder.part.is_last else None
    return (
        [[before]] if before is not None and _is_large(before) else [],
        [[norm, after]] if norm is not None and after is not None and _is_large(after) else [],
    )


def _is_large(module: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in module.parameters()) >= LARGE


def prefetch(root: FSDPModule, units: Sequence[FSDPModule], spec: FsdpSpec) -> None:
    """Let each unit gather the weights of as many following ones as `spec` says.

    Left alone, torch gathers one unit ahead in the backward pass, and in the forward pass none: on
    CUDA the host, which runs ahead of the device, then asks for the next one early all the same.
    """
    order = [root, *units]
    for at, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[at + 1 : at + 1 + spec.forward_prefetch])
        # The root's weights stay gathered; it is first in the backward pass as well.
        past = at - 1 if unit is not root else len(units)
        behind = order[past : max(0, past - spec.backward_prefetch) : -1]
        # A unit's own weights are there already: an order to gather them replaces torch's own.
        unit.set_modules_to_backward_prefetch(behind or [unit])


@contextmanager
def resharding_over(shards: DeviceMesh, reshard: bool | int) -> Iterator[None]:
    """Give all units one mesh of `reshard` ranks to shard over between forward and backward.

    torch makes a mesh for each unit: 2 new process groups a layer, and with axes pp or tp their
    names clash, for ranks outside of `shards` make others at the same time.
    """
    if isinstance(reshard, bool) or reshard == shards.size():
        yield
        return
    parts = (shards.size() // reshard, reshard)
    mesh = shards._unflatten(0, parts, ("dp_shard_outer", "dp_shard_inner"))
    smaller = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    made = getattr(internals, MESH_MAKER)

    def shared(wish: bool | int, whole: FSDPMeshInfo) -> FSDPMeshInfo | None:
        return made(wish, whole) if isinstance(wish, bool) else smaller

    setattr(internals, MESH_MAKER, shared)
    try:
        yield
    finally:
        setattr(internals, MESH_MAKER, made)

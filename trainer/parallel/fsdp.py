"""FSDP2: weights, gradients and moments are sharded; weights are gathered unit by unit for use.

With axis dp_replicate the shards are replicated (HSDP). The ranks of axis cp belong to the sharding
group, because they process other tokens with the same weights.
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
"""The function in torch's `fully_shard` that creates the mesh for a numeric
`reshard_after_forward`."""

LARGE = 2**22
"""With at least this many parameters, 16 MiB in float32, embedding and head are units of their own.
For fewer, the time of one more collective is not worth the memory."""


class ShardedGradients:
    def __init__(self, decoder: FSDPModule, spec: FsdpSpec) -> None:
        self._decoder = decoder
        self._reshard_between = spec.reshard is not False
        self._each = spec.reduce == "each"

    def in_backward(self, last: bool) -> None:
        reduces = last or self._each
        self._decoder.set_is_last_backward(reduces)
        self._decoder.set_requires_gradient_sync(reduces)
        # Replicas average their shards once, after the sum over the micro batches.
        self._decoder.set_requires_all_reduce(last)
        # If weights stay gathered after forward, they also stay between the passes of one step.
        self._decoder.set_reshard_after_backward(last or self._reshard_between)

    def finish(self) -> None:
        """Nothing to do: FSDP reduces in the backward pass."""


def apply_fsdp(
    decoder: Decoder, ranks: Ranks, spec: FsdpSpec, train: TrainSpec
) -> ShardedGradients | None:
    """Shard `decoder`. A single rank that computes in float32 needs no FSDP; with bfloat16 it does,
    because FSDP keeps the float32 master weights."""
    replicas, shards = ranks.mesh["dp_replicate"], ranks.shards
    units, dtype = wrap_units(decoder, spec.wrap), train.compute_dtype
    alone = replicas.size() * shards.size() == 1
    if alone and dtype == "float32" and not spec.cpu_offload:
        return None
    common: dict[str, Any] = {
        "mesh": joined(replicas, shards) if replicas.size() > 1 else shards,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == "float32" else getattr(torch, dtype),
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
            # The backward pass begins with the last unit, so freeing it would only gather it again.
            keep = unit is ordered[-1]
            fully_shard(unit, reshard_after_forward=False if keep else reshard, **common)
        fully_shard(decoder, reshard_after_forward=False, **common)
    root = cast(FSDPModule, decoder)
    prefetch(root, [cast(FSDPModule, unit[0]) for unit in ordered], spec)
    if ranks.device.type == "cpu":
        # A CPU has no streams, so a synchronous prefetch would block.
        root._set_unshard_async_op(True)
    return ShardedGradients(root, spec)


def wrap_units(decoder: Decoder, wrap: str) -> list[nn.Module]:
    """The modules that FSDP gathers one at a time, in the order of their use.

    Raises:
        TrainingError: the decoder layers have no module of class `wrap` with parameters.
    """
    layers = list(decoder.layers.values())
    if wraps_layers(decoder, wrap):
        return layers
    by_class: dict[str, list[nn.Module]] = {}
    for module in (module for layer in layers for module in layer.modules()):
        if any(True for _ in module.parameters()):
            by_class.setdefault(type(module).__name__, []).append(module)
    if wrap not in by_class:
        names = ", ".join(sorted({decoder.family.layer_class, *by_class} - {"CheckpointWrapper"}))
        raise TrainingError(
            f"parallel.fsdp.wrap: no module of the decoder layers is a {wrap}",
            fix=f"choose one of {names}, or auto",
        )
    return by_class[wrap]


def wraps_layers(decoder: Decoder, wrap: str) -> bool:
    """Whether each unit is a whole layer. If not, a layer's parts are gathered while it runs."""
    return wrap in ("auto", decoder.family.layer_class)


def outer_units(decoder: Decoder) -> tuple[list[list[nn.Module]], list[list[nn.Module]]]:
    """Large modules before and after the layers, which become units. The root has the rest."""
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
    """Make each unit prefetch the weights of as many following units as `spec` says.

    By default torch prefetches one unit in the backward pass and none in the forward pass, where on
    CUDA the host runs ahead of the device and so requests the next unit early anyway.
    """
    order = [root, *units]
    for at, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[at + 1 : at + 1 + spec.forward_prefetch])
        # The root's weights stay gathered. The root is also first in the backward pass.
        past = at - 1 if unit is not root else len(units)
        behind = order[past : max(0, past - spec.backward_prefetch) : -1]
        # An empty list would restore torch's default. The unit itself is already gathered, so to
        # prefetch it does nothing.
        unit.set_modules_to_backward_prefetch(behind or [unit])


@contextmanager
def resharding_over(shards: DeviceMesh, reshard: bool | int) -> Iterator[None]:
    """Make all units share one mesh of `reshard` ranks to shard over between forward and backward.

    torch 2.13 creates a mesh per unit: 2 process groups per layer. With axes pp or tp, the names of
    these groups clash, because ranks outside of `shards` create other groups at the same time. It
    has no argument for that mesh, so its function is replaced while the units are made.
    """
    if isinstance(reshard, bool) or reshard == shards.size():
        yield
        return
    parts = (shards.size() // reshard, reshard)
    mesh = shards._unflatten(0, parts, ("dp_shard_outer", "dp_shard_inner"))
    smaller = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    original = getattr(internals, MESH_MAKER)

    def shared(reshard: bool | int, whole: FSDPMeshInfo) -> FSDPMeshInfo | None:
        return original(reshard, whole) if isinstance(reshard, bool) else smaller

    setattr(internals, MESH_MAKER, shared)
    try:
        yield
    finally:
        setattr(internals, MESH_MAKER, original)

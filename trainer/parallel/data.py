"""Data parallel: parameters, gradients and optimizer state sharded by FSDP2, replicated by HSDP."""

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.model.decoder import Decoder


def apply_data_parallel(
    decoder: Decoder, mesh: DeviceMesh, dtype: Literal["float32", "bfloat16"]
) -> None:
    """Shard each decoder layer, and the rest as one more unit.

    One rank that computes in the master weights' own type is left unsharded; bfloat16 needs FSDP
    even there, for it is what keeps float32 weights beside the ones computed with.
    """
    axes = data_axes(mesh)
    if axes.size() == 1 and dtype == "float32":
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype == "bfloat16" else None,
        reduce_dtype=torch.float32,
    )
    for layer in decoder.layers.values():
        fully_shard(layer, mesh=axes, mp_policy=policy)
    fully_shard(decoder, mesh=axes, mp_policy=policy)


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """What weights are sharded over, after what they are copied over, if there are copies.

    Ranks of axis cp have the same weights and see other tokens, so they shard like dp_shard's.
    """
    shards = mesh["dp_shard"]
    if mesh["cp"].size() > 1:
        shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if mesh["dp_replicate"].size() == 1:
        return shards
    # Looking up a flattened axis by its name is deprecated.
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])


def reduce_gradients_in_backward(decoder: Decoder, last: bool) -> None:
    """Gradients of all but the `last` micro batch of a step stay where they are computed."""
    if isinstance(decoder, FSDPModule):
        decoder.set_is_last_backward(last)
        decoder.set_requires_gradient_sync(last)

"""Data parallel: parameters, gradients and optimizer state sharded by FSDP2, replicated by HSDP."""

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.model.decoder import Decoder
from trainer.model.quantize import unsharded


def apply_data_parallel(
    decoder: Decoder, mesh: DeviceMesh, dtype: Literal["float32", "bfloat16"]
) -> None:
    """Shard each decoder layer, and the rest as one more unit.

    One rank that computes in the master weights' own type is left unsharded; bfloat16 needs FSDP
    even there, for it is what keeps float32 weights beside the ones computed with.
    """
    replicas, shards = mesh["dp_replicate"].size(), mesh["dp_shard"].size()
    if replicas * shards == 1 and dtype == "float32":
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype == "bfloat16" else None,
        reduce_dtype=torch.float32,
    )
    axes = mesh["dp_replicate", "dp_shard"] if replicas > 1 else mesh["dp_shard"]
    ignored = unsharded(decoder, shards)
    for layer in decoder.layers.values():
        fully_shard(layer, mesh=axes, mp_policy=policy, ignored_params=ignored)
    fully_shard(decoder, mesh=axes, mp_policy=policy, ignored_params=ignored)


def reduce_gradients_in_backward(decoder: Decoder, last: bool) -> None:
    """Gradients of all but the `last` micro batch of a step stay where they are computed."""
    if isinstance(decoder, FSDPModule):
        decoder.set_is_last_backward(last)
        decoder.set_requires_gradient_sync(last)

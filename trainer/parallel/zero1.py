"""ZeRO-1 (Rajbhandari et al. 2020): replicated weights, sharded optimizer state.

The optimizer of each rank updates shards: rows of the parameters, which share the parameters'
memory. A shard is a DTensor with the layout of FSDP, so gradient norm, clipping and checkpoints
need no special case, and each strategy can load the checkpoints of the others. The last backward
pass of a step reduce-scatters gradients, and the updated rows are gathered after the optimizer
step. The traffic is the same as with DDP.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_gather_single, reduce_scatter_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from orchestrator.contract.spec.types import Dtype
from trainer.model.decoder import Decoder
from trainer.model.regions import local_part
from trainer.parallel.buckets import Buckets, bucketed, set_gradient, trained
from trainer.parallel.ddp import gradients_of
from trainer.rank.ranks import Ranks, joined

SHARD = "zero1_shard"
"""Attribute of a parameter that holds this rank's shard of it."""


def apply_zero1(decoder: Decoder, ranks: Ranks, reduce_dtype: Dtype) -> Buckets | None:
    replicas = ranks.replicas
    if replicas.size() == 1:
        return None
    group, dtype = replicas.get_group(), getattr(torch, reduce_dtype)
    decoder.replicas = replicas

    def exchange(parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
        return reduce_scatter(parameters, group, dtype)

    return Buckets(decoder, exchange)


def make_shards(decoder: Decoder) -> None:
    """Create this rank's shards. The decoder must have storage. Does nothing without ZeRO-1."""
    replicas = decoder.replicas
    if replicas is None:
        return
    for parameter in trained(decoder):
        setattr(parameter, SHARD, nn.Parameter(cut(parameter.detach(), replicas)))


def shard_of(parameter: nn.Parameter) -> nn.Parameter | None:
    return cast("nn.Parameter | None", getattr(parameter, SHARD, None))


def cut(whole: torch.Tensor, replicas: DeviceMesh) -> DTensor:
    """This rank's rows of `whole`, in the same memory."""
    local = local_part(whole)
    first, stop = rows(local.shape[0], replicas.size(), replicas.get_local_rank())
    mesh, placements = replicas, [cast(Placement, Shard(0))]
    if isinstance(whole, DTensor):
        mesh = joined(replicas, whole.device_mesh)
        if Shard(0) in whole.placements:
            # tp has already sharded the rows, and this splits each rank's contiguous rows further.
            placements = [_StridedShard(0, split_factor=whole.device_mesh.size())]
        placements += whole.placements
    return DTensor.from_local(
        local[first:stop],
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def rows(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First row and stop row of `rank`, as torch.chunk and FSDP split them."""
    each = math.ceil(num_rows / num_ranks)
    return min(num_rows, rank * each), min(num_rows, (rank + 1) * each)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a rank's rows of several tensors in one flat buffer. Padding makes the buffers of
    all ranks equally long."""

    shapes: list[torch.Size]
    num_ranks: int

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor in the buffer, padding included."""
        return [
            math.ceil(shape[0] / self.num_ranks) * math.prod(shape[1:]) for shape in self.shapes
        ]

    def pieces(self, flat: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Views of the rows of `rank` in its buffer `flat`, without padding."""
        found = []
        for shape, piece in zip(self.shapes, flat.split(self.sizes), strict=True):
            first, stop = rows(shape[0], self.num_ranks, rank)
            part = torch.Size((stop - first, *shape[1:]))
            found.append(piece[: part.numel()].view(part))
        return found


def reduce_scatter(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype
) -> Callable[[], None]:
    """Start to average the gradients in `dtype`, and free them. The function it returns waits, and
    sets the gradient of each shard."""
    gradients = gradients_of(parameters)
    layout = Layout([g.shape for g in gradients], group.size())
    everyone = by_rank(gradients, layout, dtype)
    for parameter in parameters:
        parameter.grad = None
    mine = everyone.new_empty(sum(layout.sizes))
    work = reduce_scatter_single(mine, everyone, dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None

    def finish() -> None:
        work.wait()
        for parameter, piece in zip(parameters, layout.pieces(mine, group.rank()), strict=True):
            shard = shard_of(parameter)
            assert shard is not None
            set_gradient(shard, piece)

    return finish


def by_rank(gradients: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The flat buffers of all ranks, one after the other. A single gradient that already has this
    form is not copied."""
    first = gradients[0]
    if len(gradients) == 1 and first.dtype == dtype and _is_even(first, layout.num_ranks):
        return first.view(-1)
    everyone = first.new_empty((layout.num_ranks, sum(layout.sizes)), dtype=dtype)
    torch._chunk_cat(list(gradients), dim=0, num_chunks=layout.num_ranks, out=everyone)
    return everyone.view(-1)


def _is_even(whole: torch.Tensor, num_ranks: int) -> bool:
    """The rows of each rank are one part of the memory of `whole`, without padding."""
    return whole.is_contiguous() and whole.shape[0] % num_ranks == 0


def gather_whole(decoder: Decoder) -> Callable[[], None] | None:
    """A function that gathers the rows that other ranks updated; None without ZeRO-1."""
    replicas = decoder.replicas
    if replicas is None:
        return None
    group, buckets = replicas.get_group(), bucketed(trained(decoder))

    @torch.no_grad()
    def gather() -> None:
        # One bucket ahead, so that the copy of one overlaps with the transfer of the next.
        copies: list[Callable[[], None]] = []
        for parameters in buckets:
            copies.append(all_gather([local_part(p) for p in parameters], group))
            if len(copies) > 1:
                copies.pop(0)()
        for copy in copies:
            copy()

    return gather


def all_gather(wholes: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    """Start to gather the rows of all ranks into `wholes`. The function it returns waits."""
    if len(wholes) == 1 and _is_even(wholes[0], group.size()):
        (own,) = _rows_of(wholes, group, group.rank())
        work = all_gather_single(wholes[0].view(-1), own.view(-1), group=group, async_op=True)
        assert work is not None
        return cast(Callable[[], None], work.wait)
    layout = Layout([whole.shape for whole in wholes], group.size())
    mine = wholes[0].new_empty(sum(layout.sizes))
    torch._foreach_copy_(layout.pieces(mine, group.rank()), _rows_of(wholes, group, group.rank()))
    everyone = mine.new_empty(group.size() * mine.numel())
    work = all_gather_single(everyone, mine, group=group, async_op=True)
    assert work is not None

    def finish() -> None:
        work.wait()
        for rank, flat in enumerate(everyone.view(group.size(), -1)):
            torch._foreach_copy_(_rows_of(wholes, group, rank), layout.pieces(flat, rank))

    return finish


def _rows_of(
    wholes: Sequence[torch.Tensor], group: dist.ProcessGroup, rank: int
) -> list[torch.Tensor]:
    return [whole[slice(*rows(whole.shape[0], group.size(), rank))] for whole in wholes]

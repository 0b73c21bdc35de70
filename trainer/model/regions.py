"""Which part of a parameter a rank holds, as the indices of the whole that its elements have."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Region = tuple[slice, ...]
"""One slice for each dimension of the whole tensor, with start and stop."""


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `parameter`; writing to it writes to the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_region(parameter: torch.Tensor) -> Region:
    """Where the local part lies in the whole.

    It is one box for every way that we cut: FSDP on top of tensor parallel cuts what tensor
    parallel has left, so its rows lie together too, though torch calls that sharding strided.
    """
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def overlap(first: Region, second: Region) -> Region | None:
    """The box that both have in common; None where there is none."""
    both = tuple(
        slice(max(one.start, other.start), min(one.stop, other.stop))
        for one, other in zip(first, second, strict=True)
    )
    return both if all(part.start < part.stop for part in both) else None


def within(inner: Region, outer: Region) -> Region:
    """`inner`, a part of `outer`, counted from where `outer` begins."""
    return tuple(
        slice(part.start - whole.start, part.stop - whole.start)
        for part, whole in zip(inner, outer, strict=True)
    )

"""The region (index ranges) of a parameter that a rank holds."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Region = tuple[slice, ...]
"""One slice for each dimension of the whole tensor, with start and stop."""


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of `parameter`. It shares the memory of the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_region(parameter: torch.Tensor) -> Region:
    """The region of the local part in the whole tensor.

    It is always one box. FSDP splits the part that tensor parallel left, so its rows are contiguous
    too, although torch calls that placement a strided shard.
    """
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def overlap(first: Region, second: Region) -> Region | None:
    """The intersection; None if it is empty."""
    both = tuple(
        slice(max(one.start, other.start), min(one.stop, other.stop))
        for one, other in zip(first, second, strict=True)
    )
    return both if all(part.start < part.stop for part in both) else None


def within(inner: Region, outer: Region) -> Region:
    """`inner`, a part of `outer`, relative to the start of `outer`."""
    return tuple(
        slice(part.start - whole.start, part.stop - whole.start)
        for part, whole in zip(inner, outer, strict=True)
    )

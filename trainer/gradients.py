"""The norm of the whole gradient over all axes of the mesh, and gradient clipping."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

Parts = list[tuple[torch.Tensor, int]]
"""This rank's part of each gradient, and the number of ranks that hold the same part."""


def local_gradients(
    parameters: Iterable[nn.Parameter], stage_ranks: int, tied: Iterable[nn.Parameter] = ()
) -> Parts:
    """The gradient parts of `parameters`. `stage_ranks` ranks work on this pipeline stage, and
    another stage holds a copy of the `tied` ones."""
    parts = []
    twice = {id(parameter) for parameter in tied}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        holders = stage_ranks * (2 if id(parameter) in twice else 1)
        if not isinstance(gradient, DTensor):
            parts.append((gradient, holders))
            continue
        if any(isinstance(place, Partial) for place in gradient.placements):
            # Under sequence parallel each rank has its own summand of the gradient of a norm.
            assert isinstance(parameter, DTensor)
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
        copies = math.prod(size for place, size in sizes if place.is_replicate())
        # Ranks that differ only in axes outside the parameter's mesh hold the same part too.
        outside = holders // gradient.device_mesh.size()
        parts.append((gradient.to_local(), copies * outside))
    return parts


def part_norms(parts: Parts) -> list[torch.Tensor]:
    """The norm of each part, on its device."""
    return list(torch._foreach_norm([part for part, _ in parts])) if parts else []


def squared_norm(parts: Parts, norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """This rank's summand of the squared norm of the whole gradient, float64, from `part_norms`.

    It copies nothing to or from the device, so the host does not wait.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    held: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for (_, copies), norm in zip(parts, norms, strict=True):
        held[copies].append(norm)
    for copies, several in held.items():
        total += torch.stack(several).to(device, torch.float64).square().sum() / copies
    return total


def scale(parts: Parts, factor: float) -> None:
    if factor != 1.0 and parts:
        torch._foreach_mul_([part for part, _ in parts], factor)


def scale_on_device(parts: Parts, factor: torch.Tensor) -> None:
    """`scale` by a number that the host does not know, float64. The results are the same bits."""
    if parts:
        # `scale` rounds the factor to the format of the gradients, float32, too.
        torch._foreach_mul_([part for part, _ in parts], factor.to(parts[0][0].dtype))


def clip_factor(norm: float, limit: float | None) -> float:
    """The factor that torch's `clip_grad_norm_` multiplies by."""
    return limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0


def clip_factor_on_device(norm: torch.Tensor, limit: float | None) -> torch.Tensor:
    """`clip_factor` of a norm that the host does not know."""
    one = torch.ones_like(norm)
    if limit is None:
        return one
    return torch.where(norm > limit, torch.full_like(norm, limit) / (norm + 1e-6), one)

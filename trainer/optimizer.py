"""AdamW, the learning rate as a pure function of the step, and the norm of the whole gradient."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from orchestrator.contract.spec import OptimizerSpec, ScheduleSpec, TrainSpec


def lr_at(step: int, train: TrainSpec) -> float:
    """Learning rate of `step`, counted from 1: warm-up, the peak, and the fall towards zero.

    The first step after the warm-up has the peak; zero would be reached at the step after the last,
    so that no step is spent on learning nothing.
    """
    peak, schedule = train.optimizer.lr, train.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    return peak * _decay(step, train.steps, schedule)


def _decay(step: int, steps: int, schedule: ScheduleSpec) -> float:
    if schedule.kind == "constant":
        return 1.0
    done = (step - 1 - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    done = min(1.0, max(0.0, done))
    return 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW that decays matrices only; norms and biases keep their scale."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=spec.lr,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        fused=True,
    )
    _fill_state(optimizer)
    return optimizer


def _fill_state(optimizer: torch.optim.AdamW) -> None:
    """What AdamW makes at its first step, made now: a checkpoint is loaded into it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def local_gradients(model: nn.Module) -> list[tuple[torch.Tensor, int]]:
    """This rank's part of each gradient, and how many ranks hold that same part."""
    parts = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor):
            parts.append((gradient, torch.distributed.get_world_size()))
            continue
        if any(isinstance(place, Partial) for place in gradient.placements):
            # Sequence parallel leaves each rank its own summand of a norm's gradient.
            assert isinstance(parameter, DTensor)
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
        copies = math.prod(size for place, size in sizes if place.is_replicate())
        parts.append((gradient.to_local(), copies * _ranks_outside(gradient)))
    return parts


def _ranks_outside(gradient: DTensor) -> int:
    """Ranks that differ only in axes along which the parameter is not distributed at all."""
    return torch.distributed.get_world_size() // gradient.device_mesh.size()


def squared_norm(parts: list[tuple[torch.Tensor, int]], device: torch.device) -> torch.Tensor:
    """This rank's summand of the squared norm of the whole gradient."""
    norms = torch._foreach_norm([part for part, _ in parts])
    copies = torch.tensor([float(copies) for _, copies in parts], device=device)
    return (torch.stack(norms).double().square() / copies).sum()


def clip(parts: list[tuple[torch.Tensor, int]], norm: float, limit: float | None) -> None:
    """Scale the gradient down to `limit`, as torch's own `clip_grad_norm_` does."""
    if limit is not None and norm > limit:
        torch._foreach_mul_([part for part, _ in parts], limit / (norm + 1e-6))

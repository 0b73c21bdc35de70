"""The optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from orchestrator.contract.train import OptimizerSpec, ScheduleSpec, TrainSpec


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


def build_optimizer(parameters: Sequence[nn.Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW that decays matrices only; norms and biases keep their scale."""
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

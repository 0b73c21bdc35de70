"""The optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from orchestrator.contract.spec.train_spec import OptimizerSpec, ScheduleSpec, TrainSpec


def lr_at(step: int, train: TrainSpec) -> float:
    """Learning rate of `step`, counted from 1: warm-up, peak, decay towards zero.

    The first step after the warm-up has the peak rate. The rate would be zero at the step after the
    last one, so that no step has a rate of zero.
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


def build_optimizer(
    parameters: Sequence[nn.Parameter], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    """The optimizer that `spec` names. Its state already exists, so that a checkpoint can be loaded
    into it. Weight decay applies to matrices only, not to norms and biases."""
    make, first_state = _OPTIMIZERS[spec.name]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = make(groups, spec)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = first_state(parameter.detach(), group)
    return optimizer


Group = dict[str, Any]
State = dict[str, torch.Tensor]


def _adam(
    kind: Callable[..., torch.optim.Optimizer], **how: bool
) -> Callable[[list[Group], OptimizerSpec], torch.optim.Optimizer]:
    return lambda groups, spec: kind(
        groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, **how
    )


def _adafactor(groups: list[Group], spec: OptimizerSpec) -> torch.optim.Optimizer:
    # beta2 and eps are not used: Adafactor's decay is a power of the step, and its two eps have
    # another meaning.
    return torch.optim.Adafactor(groups, lr=spec.lr, foreach=True)


def _sgd(groups: list[Group], spec: OptimizerSpec) -> torch.optim.Optimizer:
    # Not fused: torch 2.13 has no sharding strategy for `aten._fused_sgd_`.
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.beta1, foreach=True)


def _adam_state(parameter: torch.Tensor, group: Group) -> State:
    # A fused kernel reads the step count on the parameter's device, other kernels on the host.
    device = parameter.device if group.get("fused") else torch.device("cpu")
    return {
        "step": torch.zeros((), device=device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _nadam_state(parameter: torch.Tensor, group: Group) -> State:
    return {**_adam_state(parameter, group), "mu_product": torch.ones(())}


def _adafactor_state(parameter: torch.Tensor, group: Group) -> State:
    step = {"step": torch.zeros(())}
    if parameter.ndim <= 1:
        return {**step, "variance": torch.zeros_like(parameter)}
    *outer, rows, columns = parameter.shape
    return {
        **step,
        "row_var": parameter.new_zeros(*outer, rows, 1),
        "col_var": parameter.new_zeros(*outer, 1, columns),
    }


def _sgd_state(parameter: torch.Tensor, group: Group) -> State:
    return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}


_OPTIMIZERS: dict[
    str,
    tuple[
        Callable[[list[Group], OptimizerSpec], torch.optim.Optimizer],
        Callable[[torch.Tensor, Group], State],
    ],
] = {
    "adamw": (_adam(torch.optim.AdamW, fused=True), _adam_state),
    "adam": (_adam(torch.optim.Adam, fused=True), _adam_state),
    # These have no fused kernel. Weight decay is decoupled, as in AdamW.
    "nadam": (
        _adam(torch.optim.NAdam, foreach=True, decoupled_weight_decay=True),
        _nadam_state,
    ),
    "radam": (_adam(torch.optim.RAdam, foreach=True, decoupled_weight_decay=True), _adam_state),
    "adafactor": (_adafactor, _adafactor_state),
    "sgd": (_sgd, _sgd_state),
}
"""Name -> the optimizer, and the state that it would create in its first step. A test compares the
two."""


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr

"""Optimizers start with the state that torch's own would create at the first step; schedules."""

from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.contract.codec import decode
from orchestrator.contract.spec.train_spec import OptimizerSpec, TrainSpec
from trainer.optimizer import build_optimizer, lr_at, set_lr

PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95), "fused": True}),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.95), "fused": True}),
    "nadam": (
        torch.optim.NAdam,
        {"betas": (0.9, 0.95), "decoupled_weight_decay": True, "foreach": True},
    ),
    "radam": (
        torch.optim.RAdam,
        {"betas": (0.9, 0.95), "decoupled_weight_decay": True, "foreach": True},
    ),
    "adafactor": (torch.optim.Adafactor, {"foreach": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
}


def weights() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (5,), (2, 3, 4))]


def descend(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    torch.manual_seed(2)
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("name", PLAIN)
def test_filled_state_equals_the_optimizers_own(name: str) -> None:
    kind, options = PLAIN[name]
    ours, theirs = weights(), weights()
    spec = OptimizerSpec(name=name, lr=0.1, weight_decay=0.5)  # type: ignore[arg-type]
    filled = build_optimizer(ours, spec)
    decays = [(p, 0.5 if p.ndim > 1 else 0.0) for p in theirs]
    fresh = kind([{"params": [p], "weight_decay": decay} for p, decay in decays], lr=0.1, **options)
    keys = [{*filled.state[parameter]} for parameter in ours]
    descend(filled, ours)
    descend(fresh, theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert keys == [{*fresh.state[parameter]} for parameter in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in fresh.state[other].items():
            assert torch.equal(filled.state[mine][key], value), key


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    parameters = weights()
    optimizer = build_optimizer(parameters, OptimizerSpec(lr=0.1, weight_decay=0.5))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    still = [torch.equal(p, before) for p, before in zip(parameters, weights(), strict=True)]
    assert still == [False, True, False]


def test_sgd_without_momentum_keeps_no_state() -> None:
    parameters = weights()
    optimizer = build_optimizer(parameters, OptimizerSpec(name="sgd", beta1=0.0))
    descend(optimizer, parameters)
    assert not any(optimizer.state[parameter] for parameter in parameters)


def test_the_learning_rate_is_set_for_every_parameter() -> None:
    optimizer = build_optimizer(weights(), OptimizerSpec(lr=0.1))
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def schedule(kind: str, steps: int = 10, warmup_steps: int = 4) -> list[float]:
    data = {
        "steps": steps,
        "global_batch_size": 1,
        "optimizer": {"lr": 1.0},
        "schedule": {"kind": kind, "warmup_steps": warmup_steps},
    }
    spec: TrainSpec = decode(TrainSpec, data)
    return [lr_at(step, spec) for step in range(1, steps + 2)]


def test_every_schedule_warms_up_to_the_peak() -> None:
    for kind in ("constant", "linear", "cosine"):
        assert schedule(kind)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_schedule_falls_to_zero_after_the_last_step() -> None:
    assert schedule("constant")[5:] == [1.0] * 6
    assert schedule("linear")[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    cosine = schedule("cosine")
    assert cosine[7] == pytest.approx(0.5)
    assert cosine[9] > 0.0
    assert cosine[10] == pytest.approx(0.0)


def test_a_job_that_only_warms_up_does_not_divide_by_zero() -> None:
    assert schedule("cosine", steps=2, warmup_steps=2)[:2] == [0.5, 1.0]

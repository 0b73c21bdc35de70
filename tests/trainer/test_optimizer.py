"""Optimizers start with the state that torch's own would create at the first step; schedules."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import get_wsd_schedule

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.spec.train_spec import MOST_BETA, OptimizerSpec, TrainSpec
from trainer.model.regions import local_part
from trainer.optimizer import build_optimizer, lr_at, set_lr
from trainer.rank.ranks import process_group

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


def descend(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 4
) -> None:
    torch.manual_seed(2)
    for _ in range(steps):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
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


class Kernels(TorchDispatchMode):
    """Notes for each call of a fused kernel whether it was given DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "fused_adam" in str(func):
            self.sharded.append(any(isinstance(leaf, DTensor) for leaf in tree_leaves(args)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_parts_of_dtensors_are_updated_to_the_same_bits(name: Any) -> None:
    with process_group(RankEnv()):
        mesh = init_device_mesh("cpu", (1,))
        ours, theirs = (
            [nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in weights()]
            for _ in range(2)
        )
        groups = [{"params": [p], "weight_decay": 0.5 if p.ndim > 1 else 0.0} for p in theirs]
        kind, options = PLAIN[name]
        plain = kind(groups, lr=0.1, **options)
        optimizer = build_optimizer(ours, OptimizerSpec(name=name, lr=0.1, weight_decay=0.5))
        with Kernels() as kernels:
            descend(optimizer, ours)
        assert kernels.sharded == [False] * 8, "two groups in four steps"
        with Kernels() as kernels:
            descend(plain, theirs)
        assert all(kernels.sharded)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(local_part(mine), local_part(other))
            for key, value in plain.state[other].items():
                assert torch.equal(local_part(optimizer.state[mine][key]), local_part(value)), key


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_rounded_moments_change_only_what_is_stored(
    name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update is exact, because it starts from zeros. After it each moment is the exact
    one, rounded. Pieces of parameters give the same as whole ones."""
    exact, rounded, in_pieces = weights(), weights(), weights()
    spec = OptimizerSpec(name=name, lr=0.1, weight_decay=0.5)
    wide = build_optimizer(exact, spec)
    narrow = build_optimizer(rounded, replace(spec, state_dtype="bfloat16"))
    descend(wide, exact, steps=1)
    descend(narrow, rounded, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(exact, rounded, strict=True))
    for one, other in zip(exact, rounded, strict=True):
        assert narrow.state[other]["step"] == wide.state[one]["step"] == 1
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(narrow.state[other][key], wide.state[one][key].bfloat16()), key
    monkeypatch.setattr("trainer.optimizer.CHUNK", 7)
    descend(build_optimizer(in_pieces, replace(spec, state_dtype="bfloat16")), in_pieces)
    monkeypatch.undo()
    whole = weights()
    descend(build_optimizer(whole, replace(spec, state_dtype="bfloat16")), whole)
    # The kernel rounds the values at the end of a tensor in another way than the vectors before.
    torch.testing.assert_close(in_pieces, whole)


def test_rounded_moments_follow_a_gradient_that_shrinks() -> None:
    """With a larger beta than allowed a moment would stay at its value for ever."""
    parameter = nn.Parameter(torch.ones(64))
    spec = OptimizerSpec(lr=1e-3, beta1=MOST_BETA, beta2=MOST_BETA, state_dtype="bfloat16")
    optimizer = build_optimizer([parameter], spec)
    parameter.grad = torch.linspace(1.0, 2.0, 64)
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg"].clone()
    parameter.grad.zero_()
    for _ in range(400):
        optimizer.step()
    assert (optimizer.state[parameter]["exp_avg"] < before / 2).all()


@pytest.mark.parametrize(
    ("changes", "limit"),
    [({"name": "sgd"}, "float32 for sgd"), ({"beta2": 0.999}, "of at most 0.996")],
)
def test_moments_that_cannot_be_rounded_are_refused(changes: dict[str, Any], limit: str) -> None:
    with pytest.raises(Invalid) as refused:
        decode(OptimizerSpec, {"state_dtype": "bfloat16", **changes})
    assert limit in str(refused.value)
    decode(OptimizerSpec, changes)


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


def schedule(kind: str, steps: int = 10, warmup_steps: int = 4, **more: Any) -> list[float]:
    data = {
        "steps": steps,
        "global_batch_size": 1,
        "optimizer": {"lr": 1.0},
        "schedule": {"kind": kind, "warmup_steps": warmup_steps, **more},
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


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("decay_steps", "lowest"), [(7, 0.1), (26, 0.0), (1, 0.5)])
def test_schedules_are_those_of_transformers_after_the_warm_up(
    kind: str, decay_steps: int, lowest: float
) -> None:
    steps, warmup = 30, 4
    theirs = get_wsd_schedule(
        torch.optim.SGD(weights(), lr=1.0),
        num_warmup_steps=warmup,
        num_decay_steps=decay_steps,
        num_training_steps=steps,
        min_lr_ratio=lowest,
        decay_type=kind,
    )
    expected = []
    for _ in range(steps + 1):
        expected.append(theirs.get_last_lr()[0])
        theirs.optimizer.step()
        theirs.step()
    found = schedule(kind, steps, warmup, decay_steps=decay_steps, min_lr_factor=lowest)
    assert found[warmup:] == pytest.approx(expected[warmup:])
    assert found[-1] == pytest.approx(lowest)


def test_a_decay_must_fit_after_the_warm_up_and_a_constant_rate_has_none() -> None:
    with pytest.raises(Invalid, match=r"decay_steps.*at most steps.*\(6\)"):
        schedule("cosine", decay_steps=7)
    with pytest.raises(Invalid, match=r"linear or cosine with decay_steps"):
        schedule("constant", min_lr_factor=0.1)

"""The optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from orchestrator.contract.spec.train_spec import OptimizerSpec, ScheduleSpec, TrainSpec
from trainer.model.regions import local_part


def lr_at(step: int, train: TrainSpec) -> float:
    """Learning rate of `step`, counted from 1: warm-up, peak, decay.

    The first step after the warm-up has the peak rate. The rate would reach its end at the step
    after the last one, so that no step has a rate of zero.
    """
    peak, schedule = train.optimizer.lr, train.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    return peak * _decay(step, train.steps, schedule)


def _decay(step: int, steps: int, schedule: ScheduleSpec) -> float:
    if schedule.kind == "constant":
        return 1.0
    falls = schedule.decay_steps or max(1, steps - schedule.warmup_steps)
    done = min(1.0, max(0.0, (step - 1 - (steps - falls)) / falls))
    left = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_lr_factor + (1.0 - schedule.min_lr_factor) * left


def build_optimizer(
    parameters: Sequence[nn.Parameter], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    """The optimizer that `spec` names. Its state already exists, so that a checkpoint can be loaded
    into it. Weight decay applies to matrices only, not to norms and biases."""
    make, first_state = _OPTIMIZERS[spec.name]
    if spec.state_dtype != "float32":
        first_state = _rounded_state
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


CHUNK = 2**24
"""Values whose rounded moments exist in float32 at once: 128 MiB."""


class Piece(NamedTuple):
    """Values of one parameter on this rank: all of them, or consecutive ones."""

    weights: torch.Tensor
    gradients: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    step: torch.Tensor


class ShardAdam(torch.optim.Optimizer):
    """Adam or AdamW on this rank's part of each parameter, with the kernel and the bits of torch's
    own optimizers.

    Those give the kernel DTensors, and torch then looks for a sharding of every parameter in the
    first two steps. That takes longer than the rest of a first step.

    Moments may be bfloat16 between steps. Each step then computes in float32, with the same kernel,
    and rounds the new moments to the nearest value.
    """

    def __init__(self, groups: list[Group], spec: OptimizerSpec) -> None:
        self._kernel = adamw if spec.name == "adamw" else adam
        self._rounds = spec.state_dtype != "float32"
        betas = (spec.beta1, spec.beta2)
        super().__init__(groups, {"lr": spec.lr, "betas": betas, "eps": spec.eps, "fused": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parts = list(self._parts(group))
            if self._rounds:
                self._update_rounded(group, parts)
            else:
                means, squares = [part.mean for part in parts], [part.square for part in parts]
                self._update(group, parts, means, squares, [part.step for part in parts])

    def _parts(self, group: Group) -> Iterator[Piece]:
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                yield Piece(
                    local_part(parameter),
                    local_part(parameter.grad),
                    local_part(state["exp_avg"]),
                    local_part(state["exp_avg_sq"]),
                    state["step"],
                )

    def _update_rounded(self, group: Group, parts: list[Piece]) -> None:
        for pieces in _in_chunks(_split(parts)):
            means = [piece.mean.float() for piece in pieces]
            squares = [piece.square.float() for piece in pieces]
            # A parameter may have several pieces, but its steps are counted once.
            self._update(group, pieces, means, squares, [piece.step.clone() for piece in pieces])
            torch._foreach_copy_([piece.mean for piece in pieces], means)
            torch._foreach_copy_([piece.square for piece in pieces], squares)
        skip = self._skip()
        for part in parts:
            part.step.add_(1 if skip is None else 1 - skip)

    def _update(
        self,
        group: Group,
        pieces: list[Piece],
        means: list[torch.Tensor],
        squares: list[torch.Tensor],
        steps: list[torch.Tensor],
    ) -> None:
        """Change weights, `means` and `squares`, and count `steps` up."""
        beta1, beta2 = group["betas"]
        self._kernel(
            [piece.weights for piece in pieces],
            [piece.gradients for piece in pieces],
            means,
            squares,
            [],
            steps,
            fused=True,
            found_inf=self._skip(),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _skip(self) -> torch.Tensor | None:
        """1 if the kernel must change nothing; set by `update_if`, as in torch's own optimizers."""
        return getattr(self, "found_inf", None)


def _split(parts: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces with at most `CHUNK` values."""
    for part in parts:
        changed = (tensor.view(-1) for tensor in (part.weights, part.mean, part.square))
        flat = part.gradients.reshape(-1), *changed
        for g, w, m, v in zip(*(tensor.split(CHUNK) for tensor in flat), strict=True):
            yield Piece(w, g, m, v, part.step)


def _in_chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Lists of pieces with at most `CHUNK` values."""
    chunk: list[Piece] = []
    filled = 0
    for piece in pieces:
        size = piece.weights.numel()
        if chunk and filled + size > CHUNK:
            yield chunk
            chunk, filled = [], 0
        # A rank may have no rows of a small parameter.
        if size:
            chunk.append(piece)
            filled += size
    if chunk:
        yield chunk


def _rounded_state(parameter: torch.Tensor, group: Group) -> State:
    moments = ("exp_avg", "exp_avg_sq")
    zeros = {key: torch.zeros_like(parameter, dtype=torch.bfloat16) for key in moments}
    return {"step": torch.zeros((), device=parameter.device), **zeros}


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
    "adamw": (ShardAdam, _adam_state),
    "adam": (ShardAdam, _adam_state),
    # These have no fused kernel. Weight decay is decoupled, as in AdamW.
    "nadam": (_adam(torch.optim.NAdam, foreach=True, decoupled_weight_decay=True), _nadam_state),
    "radam": (_adam(torch.optim.RAdam, foreach=True, decoupled_weight_decay=True), _adam_state),
    "adafactor": (_adafactor, _adafactor_state),
    "sgd": (_sgd, _sgd_state),
}
"""Name -> the optimizer, and the state that it would create in its first step. A test compares the
two."""


def update_if(apply: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` if `apply` is true; else weights and state keep their bits. The host does
    not learn which. The optimizer must be one of `SKIP_ON_DEVICE`.

    This uses the attribute by which torch's GradScaler skips an update.
    """
    fused: Any = optimizer
    fused.found_inf = (~apply).float()
    try:
        optimizer.step()
    finally:
        del fused.found_inf


@contextmanager
def update_threads(number: int) -> Iterator[None]:
    """Compute with so many threads inside. A rank has one, because its GPU does the rest."""
    before = torch.get_num_threads()
    if number <= before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr

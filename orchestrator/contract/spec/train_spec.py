"""How a model learns: steps and batch, arithmetic, optimizer, and what is watched meanwhile."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost, Matches
from orchestrator.contract.spec.types import Auto, Count, Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    name: Literal["adamw", "adam", "nadam", "radam", "adafactor", "sgd"] = "adamw"
    """One of torch.optim."""
    lr: Annotated[float, Above(0)] = 3.0e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.1
    """Of matrices; norms and biases have none."""
    beta1: Annotated[float, AtLeast(0), AtMost(0.9999)] = 0.9
    """Momentum, where the optimizer has one."""
    beta2: Annotated[float, AtLeast(0), AtMost(0.9999)] = 0.95
    eps: Annotated[float, Above(0)] = 1.0e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    kind: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up; linear and cosine end at zero."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """A torch.profiler trace and a memory snapshot, under `profiles/` of the run directory."""

    at_step: Count
    """The first step that is recorded."""
    steps: Count = 2
    ranks: tuple[Annotated[int, AtLeast(0)], ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeSpec:
    """When a loss that is finite ends the job all the same; off unless it is asked for."""

    deviations: Annotated[float, Above(0)] = 8.0
    """Robust standard deviations (1.4826 median absolute deviations, at least 1 % of the median)
    above the median of the losses before."""
    window: Annotated[int, AtLeast(8)] = 64
    """Losses that are looked back on, those of a spike not counted; before there are so many,
    nothing is judged."""
    steps: Count = 8
    """Steps in a row above it that are a spike; fewer are passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    steps: Count
    """Optimizer steps of the whole job."""
    global_batch_size: Count
    """Sequences per optimizer step, whatever the number of hosts: accumulation fills it up."""
    base_batch_size: Count | None = None
    """Sequences per step that `optimizer.lr` was found with; where global_batch_size differs,
    `ndctl plan` says what the rules of scaling make of the rate. It changes no training."""
    micro_batch_size: Count | Auto = "auto"
    """Sequences that one data-parallel rank passes through the model at a time."""
    seed: Annotated[int, AtLeast(0), AtMost(2**63 - 1)] = 0
    dtype: Dtype = "float32"
    """What the model computes in; master weights are float32 either way."""
    reduce_dtype: Dtype = "float32"
    """What gradients are added up in across data-parallel ranks."""
    output_dtype: Dtype | None = None
    """What the model's output is cast to before the loss; null leaves it in `dtype`."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    activation_checkpointing: Literal["none", "selective", "full", "every_k", "auto"] = "auto"
    """Which activations are computed again in the backward pass; `every_k`: the
    layers' that `checkpoint_every` counts; `auto`: as little as the memory makes necessary, and
    none without a planner."""
    checkpoint_every: Count | None = None
    """The k of `every_k`; null is √L, rounded."""
    compile: bool = False
    """torch.compile each decoder layer."""
    float8: bool = False
    """Linear layers compute in float8 (torchao), on Hopper GPUs and newer."""
    z_loss: Annotated[float, Above(0)] | None = None
    """Weight of the squared log of the softmax's normaliser (PaLM, Chowdhery et al. 2022)."""
    max_bad_steps: Count = 3
    """Steps in a row whose loss or gradient is not finite, each skipped, that fail the job."""
    spike: SpikeSpec | None = None
    """With it, a loss that stays far above what it was ends the ranks as one that is not finite
    does."""
    eval_every: Count | None = None
    """Steps between two evaluations on `data.validation`."""
    eval_sequences: Count | None = None
    """Sequences of one evaluation, the first of the held-out ones; null takes all there are."""
    profile: ProfileSpec | None = None
    tensorboard: bool = False
    """Write the metrics to `tensorboard/` of the run directory as well."""
    wandb: Annotated[str, Matches(r".+", "a project's name, not empty", "llama")] | None = None
    """Weights & Biases project that the metrics go to as well."""
    device_tflops: Annotated[float, Above(0)] | None = None
    """Peak of one device in `dtype`, 1e12 operations a second, for the MFU; null takes the vendor's
    figure for the GPU at hand."""
    grad_clip: Annotated[float, Above(0)] | None = 1.0
    """Largest norm of the whole gradient; null leaves it as it is."""

    def __post_init__(self) -> None:
        problems = []
        if self.schedule.warmup_steps > self.steps:
            problems.append(
                Problem(
                    path="schedule.warmup_steps",
                    value=self.schedule.warmup_steps,
                    limit=f"at most steps ({self.steps})",
                    fix=f"set warmup_steps to {max(1, self.steps // 10)} or raise steps",
                )
            )
        micro, batch = self.micro_batch_size, self.global_batch_size
        if micro != "auto" and batch % micro:
            divisors = [n for n in range(1, batch + 1) if batch % n == 0 and n <= micro]
            problems.append(
                Problem(
                    path="micro_batch_size",
                    value=micro,
                    limit=f"a divisor of global_batch_size ({batch})",
                    fix=f"set micro_batch_size to {divisors[-1]}, or to auto",
                )
            )
        if problems:
            raise Invalid(problems)

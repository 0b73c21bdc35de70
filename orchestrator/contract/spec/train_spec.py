"""How the model is trained: steps, batch, number formats, optimizer, checks and metrics."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Struct, field

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost, Matches
from orchestrator.contract.spec.types import Auto, Count, Dtype

MOST_CHUNKS, CHUNK_TOKENS = 8, 1024
"""Of `loss_chunks: auto`. Smaller chunks would make the head's products slower: each of them reads
and writes the whole gradient of the weights."""
ROUNDABLE = ("adamw", "adam")
"""Optimizers whose moments may be bfloat16."""
SKIP_ON_DEVICE = ("adamw", "adam")
"""Optimizers whose update the device itself can skip, by a flag that their fused kernels read."""
MOST_BETA = 0.996
"""bfloat16 has 8 significant bits: a moment that shrinks by less than 1/256 in a step is rounded
back to its value and never decays."""

Checkpointing = Literal["none", "gathers", "elementwise", "selective", "every_k", "full"]

BY_OPERATION: frozenset[Checkpointing] = frozenset({"elementwise", "selective"})
"""Modes that recompute some operations of each layer. The others recompute whole layers."""

STORES_ALL: frozenset[Checkpointing] = frozenset({"none", "gathers"})
"""Modes that repeat no computation. `gathers` repeats communication."""

SCATTERED = frozenset({"o_proj", "down_proj"})
"""Linear layers whose results tp reduce-scatters. The scattered results are stored."""


def stored_products(
    kind: Checkpointing, linears: Sequence[str], *, tp: int, open_end: bool
) -> frozenset[int]:
    """Positions of the products whose results a mode of `BY_OPERATION` stores.

    `elementwise` stores all, `selective` every second one from the first, like torchtitan. No
    gradient needs the result of the last product, and recomputation ends before it.

    Args:
        linears: names of the layer's linear layers, in the order of their products.
        open_end: something after the last product stores values (an adapter or dropout), so
            recomputation does not end before it.
    """
    stop = len(linears) - (not open_end)
    found = range(0, stop, 2 if kind == "selective" else 1)
    return frozenset(at for at in found if not (tp > 1 and linears[at] in SCATTERED))


def repeated_products(
    kind: Checkpointing, linears: Sequence[str], *, tp: int, open_end: bool
) -> frozenset[int]:
    """Positions of the products that a mode of `BY_OPERATION` computes a second time."""
    reached = range(len(linears) - (not open_end))
    return frozenset(reached) - stored_products(kind, linears, tp=tp, open_end=open_end)


def chunks_of_loss(wish: int | Auto, tokens: int) -> int:
    """Number of chunks in which a rank computes the loss of a micro batch of `tokens`."""
    if wish == "auto":
        return max(1, min(MOST_CHUNKS, tokens // CHUNK_TOKENS))
    return min(wish, tokens)


class OptimizerSpec(Struct, frozen=True, kw_only=True):
    """The optimizer and its settings."""

    name: Literal["adamw", "adam", "nadam", "radam", "adafactor", "sgd"] = "adamw"
    """One of torch.optim."""
    lr: Annotated[float, Above(0)] = 3.0e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.1
    """Applies to matrices only, not to norms and biases."""
    beta1: Annotated[float, AtLeast(0), AtMost(0.9999)] = 0.9
    """Momentum, if the optimizer has one."""
    beta2: Annotated[float, AtLeast(0), AtMost(0.9999)] = 0.95
    """Decay of the average of squared gradients, if the optimizer has one."""
    eps: Annotated[float, Above(0)] = 1.0e-8
    """Added to the denominator of the update, so that it is never zero."""
    state_dtype: Dtype = "float32"
    """Number format in which `adamw` and `adam` keep their two moments between steps. A step
    computes in float32 either way. `bfloat16` halves their memory and rounds them once per step."""

    def __post_init__(self) -> None:
        if self.state_dtype == "float32":
            return
        if self.name not in ROUNDABLE:
            raise Invalid(
                [
                    Problem(
                        path="state_dtype",
                        value=self.state_dtype,
                        limit=f"float32 for {self.name}",
                        fix=f"set optimizer.name to {' or '.join(ROUNDABLE)}, or remove the key",
                    )
                ]
            )
        if max(self.beta1, self.beta2) > MOST_BETA:
            raise Invalid(
                [
                    Problem(
                        path="state_dtype",
                        value=self.state_dtype,
                        limit=f"beta1 and beta2 of at most {MOST_BETA}: with larger ones a step"
                        " changes a moment by less than bfloat16 can represent",
                        fix=f"set beta1 and beta2 to at most {MOST_BETA}, or remove the key",
                    )
                ]
            )


class ScheduleSpec(Struct, frozen=True, kw_only=True):
    """The learning rate over the steps: a linear warm-up, then `kind`."""

    kind: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up; linear and cosine fall to `min_lr_factor` of the peak."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Steps in which the learning rate rises linearly from zero to `optimizer.lr`."""
    decay_steps: Count | None = None
    """The rate falls in this many last steps, and before stays at its peak (warm-up, stable,
    decay); null: in all steps after the warm-up."""
    min_lr_factor: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    """Where the rate ends, as a fraction of `optimizer.lr`."""

    def __post_init__(self) -> None:
        if self.kind == "constant" and (self.decay_steps is not None or self.min_lr_factor):
            raise Invalid(
                [
                    Problem(
                        path="kind",
                        value=self.kind,
                        limit="linear or cosine with decay_steps or min_lr_factor",
                        fix="set kind to linear, or remove those keys",
                    )
                ]
            )


class ProfileSpec(Struct, frozen=True, kw_only=True):
    """A torch.profiler trace and a memory snapshot, under `profiles/` of the run directory."""

    at_step: Count
    """The first step that is recorded."""
    steps: Count = 2
    """Number of steps that are recorded."""
    ranks: tuple[Annotated[int, AtLeast(0)], ...] = (0,)
    """Ranks that record."""


class SpikeSpec(Struct, frozen=True, kw_only=True):
    """When a finite loss counts as a spike. The check is off by default."""

    deviations: Annotated[float, Above(0)] = 8.0
    """Robust standard deviations (1.4826 median absolute deviations, at least 1 % of the median)
    above the median of the previous losses."""
    window: Annotated[int, AtLeast(8)] = 64
    """Number of previous losses, without those of a spike. The check starts once there are so many.
    """
    steps: Count = 8
    """Number of consecutive steps above the limit that count as a spike; fewer are ignored."""


class TrainSpec(Struct, frozen=True, kw_only=True):
    """How the model is trained."""

    steps: Annotated[int, AtLeast(1), AtMost(10**12)]
    """Optimizer steps of the whole job."""
    global_batch_size: Annotated[int, AtLeast(1), AtMost(1 << 24)]
    """Sequences per optimizer step. It does not depend on the number of hosts: gradients are
    accumulated until the batch is complete."""
    base_batch_size: Count | None = None
    """Sequences per step with which `optimizer.lr` was tuned. If global_batch_size differs, `ndctl
    plan` prints the rate that the usual scaling rules give. It does not change training."""
    micro_batch_size: Count | Auto = "auto"
    """Sequences that one data-parallel rank processes at a time."""
    seed: Annotated[int, AtLeast(0), AtMost(2**63 - 1)] = 0
    """Seed of the initial weights, the order of the data, and dropout."""
    dtype: Dtype | Auto = "auto"
    """Number format of the model's computation; `auto`: bfloat16 on a GPU that has it, else
    float32. Master weights are always float32."""
    reduce_dtype: Dtype = "float32"
    """Number format of the gradient reduction across data-parallel ranks."""
    output_dtype: Dtype | None = None
    """Format to which the model's output is cast before the loss; null keeps that of `dtype`."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """The optimizer and its settings."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """How the learning rate changes."""
    activation_checkpointing: Checkpointing | Auto = "auto"
    """Which activations are recomputed in the backward pass. `gathers`: with tp, layers gather
    their inputs again, and compute nothing again; `elementwise`: all but the results of matrix
    products, attention and reductions; `selective`: also every second product, as in
    torchtitan; `full`: whole layers, from their inputs; `every_k`: those of every k-th layer, k
    being `checkpoint_every`; `auto`: as few as the memory requires, none without a planner."""
    checkpoint_every: Count | None = None
    """The k of `every_k`; null is √(number of layers), rounded."""
    compile: bool | Auto = False
    """torch.compile each decoder layer. `auto`: the planner compiles on a GPU if that is faster;
    without a planner layers are compiled only for `float8: true`. It is off by default, as in
    torchtitan: each start and each new shape compile for minutes, and results round differently.
    Recomputation by operation needs `parallel.fsdp.wrap: auto` with it."""
    float8: bool | Auto = False
    """Linear layers compute in float8 (torchao), on Hopper GPUs and newer. It needs `compile`:
    without it, scaling each value takes longer than the faster products save. `auto` lets the
    planner use it where it is faster; without a planner it is off. It is off by default, because it
    changes what is computed."""
    deterministic: bool = False
    """The same losses, bit by bit, whenever the same plan runs on the same kind of devices, also
    after a failure. On GPUs this costs speed, and an operation that cannot be repeated exactly
    fails. On CPUs it always holds."""
    loss_chunks: Count | Auto = "auto"
    """Head and loss process the tokens of a micro batch in this many chunks, so that the logits
    never exist as a whole; `auto`: at most 8 chunks, of at least 1024 tokens. The planner takes
    smaller chunks if memory requires it."""
    z_loss: Annotated[float, Above(0)] | None = None
    """Weight of the squared log of the softmax normaliser (PaLM, Chowdhery et al. 2022)."""
    run_ahead: Annotated[int, AtLeast(0), AtMost(16)] | Auto = "auto"
    """Steps that a rank queues on its GPU before it waits for the loss of the oldest, so that the
    GPU does not wait for the host. Losses do not depend on it. A step that is not finite is still
    never applied, but noticed so many steps later, as is a request to stop. `auto`: 1 on a GPU with
    adamw or adam and without cpu_offload, else 0."""
    max_bad_steps: Count = 3
    """Number of consecutive steps with a loss or gradient that is not finite after which the job
    fails. Each such step is skipped."""
    spike: SpikeSpec | None = None
    """If set, a loss that stays far above the previous losses ends the ranks, like a loss that is
    not finite."""
    eval_every: Count | None = None
    """Steps between two evaluations on `data.validation`."""
    eval_sequences: Count | None = None
    """Number of held-out sequences of one evaluation, from the first; null: all."""
    profile: ProfileSpec | None = None
    """Record a torch.profiler trace at some step. null: none."""
    tensorboard: bool = False
    """Also write the metrics to `tensorboard/` of the run directory."""
    wandb: Annotated[str, Matches(r".+", "a project's name, not empty", "llama")] | None = None
    """Weights & Biases project that also gets the metrics."""
    device_tflops: Annotated[float, Above(0)] | None = None
    """Peak of one device in `dtype`, in 1e12 operations per second, for the MFU; null: the vendor's
    figure for the GPU."""
    grad_clip: Annotated[float, Above(0)] | None = 1.0
    """Largest norm of the whole gradient; null: no clipping."""

    @property
    def compute_dtype(self) -> Dtype:
        """`dtype` of a planned or running job, in which `auto` is decided."""
        assert self.dtype != "auto"
        return self.dtype

    @property
    def recompute(self) -> Checkpointing:
        """`activation_checkpointing` of a planned or running job, in which `auto` is decided."""
        assert self.activation_checkpointing != "auto"
        return self.activation_checkpointing

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
        decays, left = self.schedule.decay_steps, self.steps - self.schedule.warmup_steps
        if decays is not None and 0 <= left < decays:
            problems.append(
                Problem(
                    path="schedule.decay_steps",
                    value=decays,
                    limit=f"at most steps without those of the warm-up ({left})",
                    fix=f"set decay_steps to {left}, or remove it" if left else "remove it",
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
        if self.run_ahead not in ("auto", 0) and self.optimizer.name not in SKIP_ON_DEVICE:
            problems.append(
                Problem(
                    path="run_ahead",
                    value=self.run_ahead,
                    limit=f"0 with optimizer.name={self.optimizer.name}, because only the fused"
                    " kernels of adamw and adam can skip an update on the GPU",
                    fix="set run_ahead to auto, or use adamw",
                )
            )
        if problems:
            raise Invalid(problems)

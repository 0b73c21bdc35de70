"""What the user wants: one job, as written in one YAML file.

Frozen values that state what is true of themselves alone; whether a cluster can do it is for
`plan/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.limits import Above, AtLeast, AtMost, Matches, OneOf
from orchestrator.contract.presets import PRESETS

Auto = Literal["auto"]
Count = Annotated[int, AtLeast(1)]
Seconds = Annotated[float, Above(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Exactly one of the three keys says which transformers model is trained."""

    preset: Annotated[str, OneOf(tuple(PRESETS))] | None = None
    """A model that ndctl knows by name."""
    config: Mapping[str, Any] | None = None
    """A transformers config, inline: `{model_type: llama, hidden_size: 256, …}`."""
    path: str | None = None
    """A Hugging Face directory or a hub id in the local cache; its `config.json` is used."""

    def __post_init__(self) -> None:
        given = [key for key in ("preset", "config", "path") if getattr(self, key) is not None]
        if len(given) == 1:
            return
        first = given[0] if given else "preset"
        drop = " ".join(f"--set model.{key}=null" for key in given[1:])
        raise Invalid(
            [
                Problem(
                    path="",
                    value=", ".join(given) or "none",
                    limit="told by exactly one of preset, config, path",
                    fix=f"keep one, for example {first} ({drop})"
                    if given
                    else f"add one, for example preset: {next(iter(PRESETS))}",
                )
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    files: Annotated[str, Matches(r".+", "a file name or a glob, not empty", "corpus/**/*.txt")]
    """A glob of text files, `**` for any depth; `{stdlib}` is Python's own library folder."""
    tokenizer: Literal["bytes"] = "bytes"
    """`bytes`: each byte is a token, 256 of them."""
    sequence_length: Annotated[int, AtLeast(8), AtMost(1 << 20)]
    """Tokens that one sequence feeds to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW."""

    lr: Annotated[float, Above(0)] = 3.0e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.1
    beta1: Annotated[float, AtLeast(0), AtMost(0.9999)] = 0.9
    beta2: Annotated[float, AtLeast(0), AtMost(0.9999)] = 0.95
    eps: Annotated[float, Above(0)] = 1.0e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    kind: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up; linear and cosine end at zero."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    steps: Count
    """Optimizer steps of the whole job."""
    global_batch_size: Count
    """Sequences per optimizer step, whatever the number of hosts: accumulation fills it up."""
    micro_batch_size: Count | Auto = "auto"
    """Sequences that one data-parallel rank passes through the model at a time."""
    seed: Annotated[int, AtLeast(0), AtMost(2**63 - 1)] = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; master weights and reductions are float32 either way."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    activation_checkpointing: Literal["none", "selective", "full", "every_k", "auto"] = "none"
    """Which activations are computed again in the backward pass; `every_k`: every √L-th layer's."""
    compile: bool = False
    """torch.compile each decoder layer."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Degrees of the mesh, outermost first."""

    pp: Count = 1
    """Pipeline-parallel degree."""
    dp_replicate: Count = 1
    """Copies of the sharded model (HSDP when above 1)."""
    dp_shard: Count | Auto = "auto"
    """FSDP degree; `auto` takes every rank that the other axes leave."""
    cp: Count = 1
    """Context-parallel degree."""
    tp: Count | Auto = "auto"
    """Tensor-parallel degree, inside one host; `auto` fills the host as far as the heads divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    backend: Literal["local"] = "local"
    """Where the job runs; `local` plays the hosts as processes of this machine."""
    hosts: Count = 1
    gpus_per_host: Count = 1
    """Ranks per host, one for each device; on a machine without GPUs each is a CPU process."""
    spare_hosts: Annotated[int, AtLeast(0)] = 0
    """Hosts that register and wait, to take the place of one that breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    every_steps: Count = 100
    keep: Count = 2
    """How many complete checkpoints stay; older ones are deleted."""
    async_: bool = True
    """Write in the background while training goes on (key `async`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceSpec:
    max_restarts: Annotated[int, AtLeast(0)] = 5
    """Restarts in a row without a new checkpoint in between, after which the job fails."""
    hang_timeout: Seconds | Auto = "auto"
    """Seconds without progress that count as a hang; `auto` adapts to the observed step time."""
    init_timeout: Seconds | Auto = "auto"
    """Seconds that start-up, up to the first step, may take; `auto` is 600."""
    agent_timeout: Seconds = 10.0
    """Seconds of silence after which a host's agent counts as lost, and a leader as gone."""
    stop_grace: Seconds = 30.0
    """Seconds between SIGTERM and SIGKILL when a healthy job is stopped; time for a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: Annotated[
        str,
        Matches(
            r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
            "1 to 63 of a-z, 0-9 and -, first a letter, last not - (RFC 1035 label)",
            "llama-run-1",
        ),
    ]
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resilience: ResilienceSpec = field(default_factory=ResilienceSpec)
    run_root: Annotated[str, Matches(r".+", "a directory, not empty", "ndctl-runs")] = "ndctl-runs"
    """Where run directories are made; on a cluster, a file system that every host sees."""

"""What the user wants: one job, as written in one YAML file.

Frozen values that state what is true of themselves alone; whether a cluster can do it is for
`plan/`. Each part has a file of its own in this room.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.devices import GPU_NAMES
from orchestrator.contract.spec.data_spec import DataSpec
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.spec.limits import AtLeast, AtMost, Matches, OneOf
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.parallel_spec import ParallelSpec
from orchestrator.contract.spec.policy import PolicyRule, former_names
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.contract.spec.train_spec import TrainSpec
from orchestrator.contract.spec.types import MOST_HOSTS, Auto, Count, Devices, Hosts, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    backend: Literal["local", "slurm", "kubernetes"] = "local"
    """Where the job runs; `local` plays the hosts as processes of this machine."""
    hosts: Hosts = 1
    gpus_per_host: Devices = 1
    """Ranks per host, one for each device; on a machine without GPUs each is a CPU process."""
    gpu: Annotated[str, OneOf(GPU_NAMES)] | None = None
    """Of which kind these devices are, by the name of its hardware profile. With it a plan needs no
    inventory: hosts and devices are those that stand here. None: what the hosts say."""
    spare_hosts: Annotated[int, AtLeast(0), AtMost(MOST_HOSTS)] = 0
    """Hosts that register and wait, to take the place of one that breaks."""
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    """For `backend: slurm`."""
    kubernetes: KubernetesSpec = field(default_factory=KubernetesSpec)
    """For `backend: kubernetes`."""

    def __post_init__(self) -> None:
        if self.backend != "kubernetes" or self.gpu is None:
            return
        if self.kubernetes.gpu_resource is None:
            limit = "left out where kubernetes.gpu_resource is null: ranks run on CPUs"
            fix = "remove gpu, or name the resource, as in nvidia.com/gpu"
            raise Invalid([Problem(path="gpu", value=self.gpu, limit=limit, fix=fix)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    every_steps: Count = 100
    every: Auto | None = None
    """`auto`: `every_steps` is where the job begins; from the first save on the interval follows
    from how long training truly stands still for one and how often the job breaks (Young, Daly)."""
    keep: Count = 2
    """How many complete checkpoints stay; older ones are deleted."""
    keep_every: Count | None = None
    """Checkpoints whose step is a multiple of this stay for ever."""
    async_: bool = True
    """Write in the background while training goes on (key `async`)."""
    verify: bool = True
    """Compare the files with their checksums before going on from a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceSpec:
    max_restarts: Annotated[int, AtLeast(0)] = 5
    """Restarts in a row without a new checkpoint in between, after which the job fails."""
    max_allocations: Count = 3
    """Allocations of a scheduler in a row without a new checkpoint, after which the job fails
    rather than to be queued once more."""
    hang_timeout: Seconds | Auto = "auto"
    """Seconds without progress that count as a hang; `auto` adapts to the observed step time."""
    checkpoint_timeout: Seconds | Auto = "auto"
    """Seconds that training may stand still for a checkpoint; `auto` is 900, or `hang_timeout` if
    that is longer."""
    init_timeout: Seconds | Auto = "auto"
    """Seconds that start-up, up to the first step, may take; `auto` is 600."""
    agent_timeout: Seconds = 10.0
    """Seconds of silence after which a host's agent counts as lost, and a leader as gone."""
    stop_grace: Seconds = 30.0
    """Seconds between SIGTERM and SIGKILL when a healthy job is stopped; time for a checkpoint. On
    Slurm `cluster.slurm.notice_s` may give more."""
    shrink: bool = False
    """With hosts gone and no spare left, go on with fewer, at the same global batch."""
    min_hosts: Count = 1
    """Fewer than these are not worth it: the job goes back to the queue, or fails."""
    replace_stragglers: bool = False
    """Move the ranks of a host that keeps its peers waiting to a spare, after the next checkpoint;
    without a spare it is only reported."""
    preflight: bool | Auto = "auto"
    """Check the hosts together (one small all-reduce) before ranks start on them; `auto`: wherever
    a scheduler hands out the hosts."""
    on_oom: Literal["stop", "replan"] = "stop"
    """When a plan does not fit into the devices' memory after all: end with the planner's cheapest
    ways out, or go on with the plan that takes less and trains the same."""
    on_nan: Literal["stop", "rollback"] = "stop"
    """When the loss is not finite (train.max_bad_steps) or spikes (train.spike): end, or go back
    one checkpoint and leave out the data that was read since."""
    keep_attempts: Annotated[int, AtLeast(2)] = 100
    """So many newest attempts keep their logs, traces and profiles, once they train. What came of
    those before stays in the journal."""
    failure_classes: tuple[FailureRule, ...] = ()
    """Kinds of failure of your own: patterns or codes, scope, action, advice. They are tried before
    ndctl's."""
    policy: tuple[PolicyRule, ...] = ()
    """What to do about a failure, first match wins. These rules are tried before ndctl's, which
    `ndctl policy` lists."""

    def __post_init__(self) -> None:
        if problems := [*former_names(self.policy)]:
            raise Invalid(problems)


NAME = Matches(
    r"(?!.*\.\.)[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[_A-Za-z0-9])?",
    "1 to 63 letters, digits, -, . and _, first a letter or digit, last not - or ., without ..",
    "llama-run-1",
)
"""Of a job: folders and Slurm jobs have it, which must be neither hidden nor taken for options."""
KUBERNETES_NAME = Matches(
    r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
    "on Kubernetes 1 to 63 of a-z, 0-9 and -, first a letter, last not - (RFC 1035 label)",
    "llama-run-1",
)
"""There it is part of host names and a label's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: Annotated[str, NAME]
    """Of the run directory below `run_root`; Kubernetes takes lower case, digits and - alone."""
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    objective: Literal["throughput", "memory", "fewest_hosts"] = "throughput"
    """What the planner decides `auto` for: the shortest step, the emptiest devices, or as few of
    `cluster.hosts` as can do it, and then the shortest step."""
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resilience: ResilienceSpec = field(default_factory=ResilienceSpec)
    run_root: Annotated[str, Matches(r".+", "a directory, not empty", "ndctl-runs")] = "ndctl-runs"
    """Where run directories are made; on a cluster, a file system that every host sees."""

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise Invalid(problems)

    def _problems(self) -> Iterator[Problem]:
        if self.train.eval_every is not None and self.data.validation is None:
            yield eval_without_data(self.train.eval_every)
        hooks, init = self.cluster.slurm.hooks, self.resilience.init_timeout
        if hooks.before and hooks.timeout >= (INIT_TIMEOUT_S if init == "auto" else init):
            yield hook_without_time(hooks.timeout)
        if self.cluster.backend == "kubernetes" and not KUBERNETES_NAME.admits(self.name):
            yield Problem(
                path="name",
                value=self.name,
                limit=KUBERNETES_NAME.words,
                fix=f"for example {kubernetes_name(self.name)}",
            )


INIT_TIMEOUT_S = 600.0
"""`init_timeout: auto`: imports on a cold file system, rendezvous, loading a checkpoint."""


def hook_without_time(timeout: float) -> Problem:
    return Problem(
        path="cluster.slurm.hooks.timeout",
        value=timeout,
        limit="less than resilience.init_timeout, after which a host without an agent is given up",
        fix=f"set resilience.init_timeout to {timeout + INIT_TIMEOUT_S:g}, or this to less",
    )


def kubernetes_name(name: str) -> str:
    """One that Kubernetes takes, as near to `name` as can be."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return plain if plain[:1].isalpha() else f"job-{plain}"[:63].rstrip("-")


def eval_without_data(eval_every: int) -> Problem:
    return Problem(
        path="train.eval_every",
        value=eval_every,
        limit="given with data.validation alone",
        fix="add data.validation, for example validation: {fraction: 0.01}",
    )

"""What the user wants: one job, as written in one YAML file.

Frozen values that state what is true of themselves alone; whether a cluster can do it is for
`plan/`. The parts have files of their own: `model.py`, `data.py`, `train.py`, `parallel.py`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.data import DataSpec
from orchestrator.contract.failures import FailureRule
from orchestrator.contract.kubernetes import KubernetesSpec
from orchestrator.contract.limits import AtLeast, AtMost, Matches
from orchestrator.contract.model import ModelSpec
from orchestrator.contract.parallel import ParallelSpec
from orchestrator.contract.policy import PolicyRule
from orchestrator.contract.slurm import SlurmSpec
from orchestrator.contract.train import TrainSpec
from orchestrator.contract.words import MOST_HOSTS, Auto, Count, Devices, Hosts, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    backend: Literal["local", "slurm", "kubernetes"] = "local"
    """Where the job runs; `local` plays the hosts as processes of this machine."""
    hosts: Hosts = 1
    gpus_per_host: Devices = 1
    """Ranks per host, one for each device; on a machine without GPUs each is a CPU process."""
    spare_hosts: Annotated[int, AtLeast(0), AtMost(MOST_HOSTS)] = 0
    """Hosts that register and wait, to take the place of one that breaks."""
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    """For `backend: slurm`."""
    kubernetes: KubernetesSpec = field(default_factory=KubernetesSpec)
    """For `backend: kubernetes`."""


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
    objective: Literal["throughput", "memory", "fewest_hosts"] = "throughput"
    """What the planner decides `auto` for: the shortest step, the emptiest devices, or as few of
    `cluster.hosts` as can do it, and then the shortest step."""
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resilience: ResilienceSpec = field(default_factory=ResilienceSpec)
    run_root: Annotated[str, Matches(r".+", "a directory, not empty", "ndctl-runs")] = "ndctl-runs"
    """Where run directories are made; on a cluster, a file system that every host sees."""

    def __post_init__(self) -> None:
        if self.train.eval_every is not None and self.data.validation is None:
            raise Invalid([eval_without_data(self.train.eval_every)])


def eval_without_data(eval_every: int) -> Problem:
    return Problem(
        path="train.eval_every",
        value=eval_every,
        limit="given with data.validation alone",
        fix="add data.validation, for example validation: {fraction: 0.01}",
    )

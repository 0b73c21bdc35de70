"""The job spec: what one YAML file of a user says. It is a `JobSpec` or a `ScriptSpec`.

The classes check only what is true of the values alone. `plan/` checks whether a cluster can run
the job. Each part of a spec has a file in this folder.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid, Problem, key_of
from orchestrator.contract.devices import GPU_NAMES
from orchestrator.contract.spec.data_spec import DataSpec
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.spec.limits import AtLeast, AtMost, Matches, OneOf
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.parallel_spec import ParallelSpec
from orchestrator.contract.spec.policy import PolicyRule, former_names
from orchestrator.contract.spec.reporting.notify_spec import NotifySpec
from orchestrator.contract.spec.reporting.web_spec import WebSpec
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.contract.spec.train_spec import TrainSpec
from orchestrator.contract.spec.types import MOST_HOSTS, Auto, Count, Devices, Hosts, Seconds


class ClusterSpec(Struct, frozen=True, kw_only=True):
    """Where the job runs, and on how many hosts and devices."""

    backend: Literal["local", "slurm", "kubernetes"] = "local"
    """Where the job runs. `local` runs every host as processes of this machine."""
    hosts: Hosts = 1
    """Number of hosts that train. `spare_hosts` are additional."""
    gpus_per_host: Devices = 1
    """Ranks per host, one per device. On a machine without GPUs each is a CPU process."""
    gpu: Annotated[str, OneOf(GPU_NAMES)] | None = None
    """Hardware profile of these devices. If set, planning needs no inventory: hosts and devices are
    the ones given here. null: the hosts report their devices."""
    spare_hosts: Annotated[int, AtLeast(0), AtMost(MOST_HOSTS)] = 0
    """Hosts that register and wait, to replace a host that fails."""
    memory_margin: Annotated[float, AtLeast(0), AtMost(0.5)] | Auto = "auto"
    """Share of a device's memory that a plan leaves free, besides what the allocator is expected to
    lose to fragmentation. `auto`: 0.04 on GPUs, with which a plan fits with 9 of 10 published
    allocators; if no plan leaves that much free, plans may fill the device, with a note."""
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    """Used by `backend: slurm`."""
    kubernetes: KubernetesSpec = field(default_factory=KubernetesSpec)
    """Used by `backend: kubernetes`."""

    def __post_init__(self) -> None:
        if self.backend != "kubernetes" or self.gpu is None:
            return
        if self.kubernetes.gpu_resource is None:
            limit = "left out if kubernetes.gpu_resource is null, because ranks then run on CPUs"
            fix = "remove gpu, or name the resource, such as nvidia.com/gpu"
            raise Invalid([Problem(path="gpu", value=self.gpu, limit=limit, fix=fix)])


MOST_BY_DEFAULT = 0.25
"""Part of a host's memory that checkpoints take at most if the user has not asked for them. The
rest is for what needs memory without them too: data loaders, page cache, other jobs."""
NOT_ON_GPUS = "no GPU has run them yet; checkpoint.memory.every=on turns them on"
"""Why a job on GPUs keeps no checkpoints in memory by default."""


class MemoryCheckpointSpec(Struct, frozen=True, kw_only=True):
    """Checkpoints in the memory of the hosts, beside those on the disk."""

    every: Count | Literal["auto", "on", "off"] = "auto"
    """Steps between two of them; `on`: as few as cost at most 2 % of the time on CPUs and 0.7 % on
    GPUs. A restart on the same hosts then repeats at most as many steps, and reads no checkpoint
    from the disk. Each rank keeps three copies of its weights and optimizer state on its host; the
    disk is written from one of them. `auto`: as `on` where all copies on a host take at most a
    quarter of the memory that it can use, with fewer copies on other hosts if necessary; none on
    GPUs, because no GPU has run this yet. `off`: none. `true` and `false` mean `on` and `off`."""
    copies: Literal[0, 1, 2] = 2
    """Other hosts that get a copy of each. Any two hosts, or with 1 any host, may then be lost
    without reading a checkpoint from the disk. Each rank keeps a fourth one, and its host two for
    each rank of a partner and copy. There are fewer copies if a host has too little memory."""
    copy_mib_per_s: Count | None = None
    """MiB per second that a host sends to partners at most; no limit by default."""

    def on_devices(self, *, cpu: bool) -> "MemoryCheckpointSpec":
        """The same for ranks of the bundled trainer on CPUs or GPUs."""
        return self if cpu or self.every != "auto" else replace(self, every="off")

    def on_hosts(self, hosts: int) -> "MemoryCheckpointSpec":
        """The same for a job on `hosts` hosts, each of which has at most `hosts - 1` partners."""
        return self if self.copies < hosts else replace(self, copies=hosts - 1)

    @property
    def slots(self) -> int:
        """Checkpoints of one rank's size that a host keeps for each of its ranks: three or with
        copies four of its own, and two of a rank of each partner."""
        if self.every == "off":
            return 0
        return 4 + 2 * self.copies if self.copies else 3


class CheckpointSpec(Struct, frozen=True, kw_only=True):
    """When checkpoints are written, and which are kept."""

    every_steps: Count = 100
    """Optimizer steps between two checkpoints on the disk."""
    every: Auto | None = None
    """`auto`: start with `every_steps`. After the first save, the interval follows from how long a
    save stops training and from how often the job fails (Young, Daly)."""
    keep: Count = 2
    """Number of complete checkpoints to keep; older ones are deleted."""
    keep_every: Count | None = None
    """Checkpoints whose step is a multiple of this are never deleted."""
    async_: bool = True
    """Write in the background while training continues (key `async`)."""
    verify: bool = True
    """Compare the files with their checksums before resuming from a checkpoint. Without it only
    their sizes are compared: a flipped bit is loaded without a message."""
    memory: MemoryCheckpointSpec = field(default_factory=MemoryCheckpointSpec)
    """Checkpoints in the memory of the hosts, in addition."""


class ResilienceSpec(Struct, frozen=True, kw_only=True):
    """What happens after failures."""

    max_restarts: Annotated[int, AtLeast(0)] = 5
    """Restarts in a row without a new checkpoint, after which the job fails."""
    max_allocations: Count = 3
    """Allocations in a row without a new checkpoint, after which the job fails and is not queued
    again."""
    hang_timeout: Seconds | Auto = "auto"
    """Seconds without progress that count as a hang; `auto` adapts to the observed step time."""
    checkpoint_timeout: Seconds | Auto = "auto"
    """Seconds that training may stop for a checkpoint; `auto` is 900, or `hang_timeout` if that is
    longer."""
    init_timeout: Seconds | Auto = "auto"
    """Seconds for start-up until the first step is done; `auto` is 600."""
    agent_timeout: Seconds = 10.0
    """Seconds of silence after which an agent, or the leader, counts as lost."""
    stop_grace: Seconds = 30.0
    """Seconds between SIGTERM and SIGKILL when a healthy job is stopped, so that it can write a
    checkpoint. On Slurm `cluster.slurm.notice_s` may give more."""
    shrink: bool = False
    """If hosts are lost and no spare is left, continue with fewer at the same global batch."""
    min_hosts: Count = 1
    """With fewer hosts than this the job does not run: it is requeued, or fails."""
    replace_stragglers: bool = False
    """Move the ranks of a straggler's host to a spare after the next checkpoint. Without a spare
    the straggler is only reported."""
    replace_warned: bool = True
    """Move the ranks of a host that reports memory errors of a GPU, lost links or throttling to a
    spare at the end of the step, before it fails. Without a spare the ranks save a checkpoint at
    once and go on."""
    keep_ranks: bool = False
    """Ranks that did not fail keep their processes between two attempts: they leave the broken
    collectives and join the next attempt. Tried on CPUs only."""
    preflight: bool | Auto = "auto"
    """Check the hosts together (one small all-reduce) before ranks start on them; `auto`: if a
    scheduler assigns the hosts."""
    on_oom: Literal["stop", "replan"] = "stop"
    """If the plan does not fit into device memory after all: `stop` ends the job and prints the
    planner's cheapest alternatives; `replan` continues with the plan that needs less memory."""
    on_nan: Literal["stop", "rollback"] = "stop"
    """If the loss is not finite (train.max_bad_steps) or spikes (train.spike): `stop` ends the job;
    `rollback` goes back one checkpoint and skips the data that was read since."""
    keep_attempts: Annotated[int, AtLeast(2)] = 100
    """Number of newest attempts whose logs, traces and profiles are kept, once they train. The
    journal keeps the outcome of all attempts."""
    failure_classes: tuple[FailureRule, ...] = ()
    """Failure classes of your own: patterns or codes, scope, action, advice. They are tried before
    ndctl's."""
    policy: tuple[PolicyRule, ...] = ()
    """Rules for failures, the first match wins. They are tried before ndctl's rules, which
    `ndctl policy` lists."""
    web: WebSpec | None = None
    """The leader serves metrics for Prometheus; `web: {}` with all defaults. null: it does not.
    `ndctl serve` serves the same for any number of jobs."""

    def __post_init__(self) -> None:
        if problems := [*former_names(self.policy)]:
            raise Invalid(problems)


NAME = Matches(
    r"(?!.*\.\.)[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[_A-Za-z0-9])?",
    "1 to 63 letters, digits, -, . and _, first a letter or digit, last not - or ., without ..",
    "llama-run-1",
)
"""Name of a job. Folders and Slurm jobs get this name, so it must not be hidden or look like an
option."""
KUBERNETES_NAME = Matches(
    r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
    "on Kubernetes 1 to 63 of a-z, 0-9 and -, first a letter, last not - (RFC 1035 label)",
    "llama-run-1",
)
"""On Kubernetes the job's name is part of host names and the value of a label."""


class CommonSpec(Struct, frozen=True, kw_only=True):
    """The keys that supervision needs, whatever the ranks run."""

    name: Annotated[str, NAME]
    """Name of the run directory below `run_root`. Kubernetes allows only lower case, digits and -.
    """
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    """Where the job runs, and on how many hosts and devices."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    """When checkpoints are written, and which are kept."""
    resilience: ResilienceSpec = field(default_factory=ResilienceSpec)
    """What happens after failures: restarts, timeouts, hosts, rules of your own."""
    notify: tuple[NotifySpec, ...] = ()
    """Who is told of incidents and of the end: Slack, a webhook, mail, a command."""
    run_root: Annotated[str, Matches(r".+", "a directory, not empty", "ndctl-runs")] = "ndctl-runs"
    """Folder of the run directories; on a cluster, on a file system that every host sees."""

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise Invalid(problems)

    def _problems(self) -> Iterator[Problem]:
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


class JobSpec(CommonSpec, frozen=True, kw_only=True):
    """A job of the bundled trainer, which the planner splits over ranks."""

    model: ModelSpec
    """Which model is trained."""
    data: DataSpec
    """What it reads."""
    train: TrainSpec
    """How it is trained: steps, batch, number formats, optimizer, checks, metrics."""
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    """How the model and the batch are split over ranks. What is not given, the planner chooses."""
    objective: Literal["throughput", "memory", "fewest_hosts"] = "throughput"
    """What the planner optimizes when it decides `auto`: the shortest step, the least memory per
    device, or the fewest of `cluster.hosts` and then the shortest step."""

    def _problems(self) -> Iterator[Problem]:
        if self.train.eval_every is not None and self.data.validation is None:
            yield eval_without_data(self.train.eval_every)
        if self.train.run_ahead not in ("auto", 0) and self.parallel.fsdp.cpu_offload:
            yield Problem(
                path="train.run_ahead",
                value=self.train.run_ahead,
                limit="0 with parallel.fsdp.cpu_offload, because the host computes the update",
                fix="set train.run_ahead to auto or 0",
            )
        yield from CommonSpec._problems(self)


class ScriptSpec(CommonSpec, frozen=True, kw_only=True):
    """A job of the user's own program. It decides itself how its ranks share the work."""

    run: RunSpec
    """Your own program, in place of `model`, `data`, `train` and `parallel`."""

    @property
    def elsewhere(self) -> str:
        """Where ranks run the program, if not from a folder that this machine sees; else empty."""
        run, cluster = self.run, self.cluster
        name = f"{run.script or run.module or run.program} in `{run.workdir}`"
        if cluster.backend == "kubernetes":
            return f"pods run {name} of their image or a volume"
        if cluster.backend == "slurm" and cluster.slurm.container is not None:
            return f"ranks run {name} of their container"
        return ""

    @property
    def captured(self) -> str:
        """The folder that is copied at submission; empty: none."""
        wanted = self.run.capture and self.run.is_python and self.cluster.backend == "slurm"
        return self.run.folder if wanted and not self.elsewhere else ""

    def _problems(self) -> Iterator[Problem]:
        yield from CommonSpec._problems(self)
        yield from _settings_of_the_trainer(self)


OF_THE_TRAINER = {
    "checkpoint": ("every_steps", "every", "async_"),
    "resilience": ("shrink", "on_oom", "on_nan", "keep_ranks"),
}
"""Settings that only the bundled trainer follows: a program decides itself when it saves and how it
splits its work, and ndctl cannot skip its data."""


def _settings_of_the_trainer(spec: ScriptSpec) -> Iterator[Problem]:
    for part, names in OF_THE_TRAINER.items():
        given = getattr(spec, part)
        for name in names:
            if (value := getattr(given, name)) != getattr(type(given)(), name):
                yield Problem(
                    path=f"{part}.{key_of(name)}",
                    value=value,
                    limit="left out beside run, because only the bundled trainer follows it",
                    fix="remove it",
                )


INIT_TIMEOUT_S = 600.0
"""`init_timeout: auto`: imports from a cold file system, rendezvous, loading a checkpoint."""


def hook_without_time(timeout: float) -> Problem:
    return Problem(
        path="cluster.slurm.hooks.timeout",
        value=timeout,
        limit="less than resilience.init_timeout, after which a host without an agent is given up",
        fix=f"set resilience.init_timeout to {timeout + INIT_TIMEOUT_S:g}, or this to less",
    )


def kubernetes_name(name: str) -> str:
    """A name that Kubernetes accepts, similar to `name`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return plain if plain[:1].isalpha() else f"job-{plain}"[:63].rstrip("-")


def eval_without_data(eval_every: int) -> Problem:
    return Problem(
        path="train.eval_every",
        value=eval_every,
        limit="given only together with data.validation",
        fix="add data.validation, for example validation: {fraction: 0.01}",
    )

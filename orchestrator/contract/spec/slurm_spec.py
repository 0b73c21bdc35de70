"""What a site's Slurm needs to be told of a job, in sbatch's own words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.secret_names import is_plain_secret
from orchestrator.contract.spec.limits import AtLeast, Matches
from orchestrator.contract.spec.types import Count, Seconds

Word = Annotated[str, Matches(r"[^\s]+", "one word, without spaces", "train")]
Line = Annotated[str, Matches(r"[^\0]*", "text without a NUL character", "value")]
Time = Annotated[
    str,
    Matches(
        r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}",
        "minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as sbatch takes it",
        "2-00:00:00",
    ),
]
Flag = Annotated[
    str, Matches(r"--?[a-zA-Z].*", "an option with its dashes, as on the command line", "--nice=5")
]
OURS = (
    *("array", "clusters", "comment", "exclude", "job-name", "no-kill", "no-requeue", "nodes"),
    *("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket"),
    *("signal", "tasks-per-node", "test-only", "wait", "wrap"),
)
"""By these a job would be another than the one that was planned, or not be found any more."""
SbatchFlag = Annotated[
    Flag,
    Matches(
        rf"(?!-[aJMnNWx])(?!--(?:{'|'.join(OURS)})(?:[= ]|$)).*",
        "none of -a, -J, -M, -n, -N, -W, -x and "
        + ", ".join(f"--{name}" for name in OURS)
        + ", which ndctl says itself",
        "--nice=5; name, cluster.hosts and cluster.slurm's comment, exclude and notice_s say"
        " what may be said of these",
    ),
]


SrunFlag = Annotated[
    Flag,
    Matches(
        r"(?!--(?:het|pack)-group(?:[= ]|$)).*",
        "none of --het-group and --pack-group: a heterogeneous job does not survive a lost node",
        "--mpi=none",
    ),
]
OURS_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "PYTHONSAFEPATH"),
)
OURS_BEGIN = ("NDCTL_", "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "TORCHELASTIC_", "PMI_", "PMIX_")
"""Variables that ndctl, torchrun or Slurm set, or that change what Slurm's commands do."""
Mode = Literal[700, 750, 755, 770, 775]
"""As chmod takes it. A leading zero changes nothing: in YAML 1.2 it is the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """A container for the agents and ranks, by NVIDIA's pyxis (srun's --container-… options)."""

    image: Word
    mounts: tuple[Word, ...] = ()
    """SRC:DST[:FLAGS] each; the run root has to be among them."""
    workdir: Word | None = None
    env: tuple[Word, ...] = ()
    """Variables of the host that win over the image's own."""
    python: Word = "python3"
    """The interpreter inside the image, which has ndctl installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HooksSpec:
    """Lines of shell on each host of the job, by bash, in each of its runs: with variables and
    folder of the job, and NDCTL_RUN_DIR and NDCTL_HOST."""

    before: Line | None = None
    """Before the host's agent begins. A host on which it fails, or does not end in time, is not
    used by this run; the incident has the end of its output."""
    after: Line | None = None
    """When the host's ranks have ended, however they did, and the host has not died."""
    timeout: Seconds = 300.0
    """Seconds for `before`."""
    after_timeout: Seconds = 30.0
    """Seconds for `after`. Slurm gives it no longer than KillWait where it takes the hosts back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSpec:
    partition: Word | tuple[Word, ...] | None = None
    """One, or several of which the job gets its hosts from one. None: the cluster's default."""
    account: Word | None = None
    qos: Word | None = None
    time: Count | Time | None = None
    """Of one allocation; the job goes back to the queue at its end until all steps are done. None:
    the partition's."""
    gpus: Literal["per-node", "gres", "none"] = "per-node"
    """How `cluster.gpus_per_host` devices are asked for: --gpus-per-node, --gres=gpu:N, or not at
    all, where ranks run on CPUs or `gres` asks for them."""
    gpu_type: Word | None = None
    gres: Word | None = None
    """More generic resources, as in `nvme:1`."""
    cpus_per_task: Count | None = None
    """For the one task of a host. None: what Slurm gives; with `exclusive` the whole host."""
    mem: Word | None = None
    """Of a host, as in `500G`; `0` is all of it."""
    exclusive: bool = True
    constraint: Word | None = None
    nodelist: Word | None = None
    exclude: Word | None = None
    reservation: Word | None = None
    licenses: Word | None = None
    switches: Count | Word | None = None
    """COUNT[@WAIT]: at most so many leaf switches. None: what the plan asks for."""
    switch_wait: Annotated[int, AtLeast(0)] | Time = "1:00"
    """How long the job may wait for these beside idle hosts, in minutes or as `time`, where
    `switches` has no WAIT; `0`: not at all. Slurm's `max_switch_wait` (5 minutes by default) limits
    it as well."""
    segment: Count | None = None
    """Hosts of a block that stay together (Slurm 23.11 or newer with a block topology)."""
    comment: str | None = None
    mail_type: Word | None = None
    mail_user: Word | None = None
    notice_s: Seconds = 90.0
    """How long before the time limit (and with the site's `preempt_send_user_signal` before a
    preemption) Slurm warns: but for the last 45 s of it ranks have this long for a checkpoint, also
    where `resilience.stop_grace` is less; more of that does not help."""
    on_drain: Literal["finish", "checkpoint_and_requeue", "at_next_checkpoint"] = "finish"
    """When a host that ranks run on is drained: train on, as Slurm means it, until maintenance
    begins there or it goes; write a checkpoint at once and go on without it; or do so when the next
    checkpoint is complete. Without spares, and without `shrink`, that is in the queue."""
    env: Mapping[str, Line] = field(default_factory=dict)
    """Variables of every agent and rank. Not for secrets: the batch script has them as plain
    text."""
    group: Word | None = None
    """Unix group of the run directory and of what is made in it; you have to be in it. None: your
    own, or what the run root says."""
    mode: Mode | None = None
    """Permissions of the run directory, and so who may read (5) or write (7) what is made in it:
    owner, group, all others. The job's secret stays yours alone. None: 700."""
    hooks: HooksSpec = field(default_factory=HooksSpec)
    modules: tuple[Word, ...] = ()
    setup: tuple[str, ...] = ()
    """Lines of shell that run on the first host before the agents start."""
    container: ContainerSpec | None = None
    sbatch_args: tuple[SbatchFlag, ...] = ()
    srun_args: tuple[SrunFlag, ...] = ()
    snapshot: bool = False
    """Copy ndctl's own code into the run directory and run from there, so that a later upgrade does
    not change a job that is requeued."""

    def __post_init__(self) -> None:
        problems = [_bad_name(name) for name in self.env]
        if self.partition == ():
            problems.append(
                Problem(
                    path="partition",
                    value=[],
                    limit="one partition or more",
                    fix="name one, or leave the key out for the cluster's default",
                )
            )
        if self.group is not None and self.mode in (None, 700):
            problems.append(
                Problem(
                    path="group",
                    value=self.group,
                    limit="given with a mode that lets the group in",
                    fix="set mode to 750, with which the group may read, or 770",
                )
            )
        limit_s = None if self.time is None else seconds(str(self.time))
        problems.append(notice_too_long(self.notice_s, limit_s, "cluster.slurm.time"))
        if found := [problem for problem in problems if problem is not None]:
            raise Invalid(found)

    @property
    def partitions(self) -> tuple[str, ...]:
        """Their names; none: the cluster's default."""
        given = (self.partition,) if isinstance(self.partition, str) else self.partition or ()
        return tuple(name for one in given for name in one.split(","))


def seconds(text: str) -> int | None:
    """Of `MINUTES`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`; None of UNLIMITED or NONE."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # hours first
        hours, minutes, secs = (*parts, 0, 0)[:3]
    elif len(parts) < 3:  # minutes first
        hours, minutes, secs = (0, *parts, 0)[:3]
    else:
        hours, minutes, secs = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def notice_too_long(notice_s: float, limit_s: int | None, whose: str) -> Problem | None:
    """A warning that comes as the allocation begins would have the job leave before its first step,
    each time.

    Args:
        limit_s: of the allocation; None or 0, as in sbatch's --time: there is none.
        whose: what says so.
    """
    if not limit_s or notice_s < limit_s:
        return None
    return Problem(
        path="notice_s",
        value=notice_s,
        limit=f"less than {limit_s} s, {whose}: else Slurm warns of the end as the job begins,"
        " which goes back to the queue before its first step, each time",
        fix=f"set cluster.slurm.time to more, or notice_s to {limit_s / 2:g} or less",
    )


def _bad_name(name: str) -> Problem | None:
    """Of a variable that a spec may not set."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        limit, fix = "named with letters, digits and _, and no digit first", "rename it"
    elif name in OURS_OF_RANKS or name.startswith(OURS_BEGIN):
        limit, fix = "none that ndctl, torchrun or Slurm sets itself", "leave it out"
    else:
        return None
    return Problem(path=f"env.{name}", value=name, limit=limit, fix=fix)


def plain_secrets(spec: SlurmSpec) -> tuple[str, ...]:
    """Keys of the spec that give a variable named like a secret as plain text. A path is none."""
    return tuple(f"env.{name}" for name, value in spec.env.items() if is_plain_secret(name, value))

"""What a job needs to say about a site's Slurm, in sbatch's own terms."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Struct, field

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
"""Options that would make the job differ from the plan, or hide it from ndctl."""
SbatchFlag = Annotated[
    Flag,
    Matches(
        rf"(?!-[aJMnNWx])(?!--(?:{'|'.join(OURS)})(?:[= ]|$)).*",
        "none of -a, -J, -M, -n, -N, -W, -x and "
        + ", ".join(f"--{name}" for name in OURS)
        + ", which ndctl sets itself",
        "--nice=5; some of these have a key of their own: name, cluster.hosts, and"
        " cluster.slurm's comment, exclude and notice_s",
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
"""As chmod takes it. A leading zero makes no difference: YAML 1.2 reads the same number."""


class ContainerSpec(Struct, frozen=True, kw_only=True):
    """A container for agents and ranks, by NVIDIA's pyxis (srun's --container-… options)."""

    image: Word
    """The image, as `--container-image` of srun takes it: a path of a .sqsh file, or a registry's
    name."""
    mounts: tuple[Word, ...] = ()
    """SRC:DST[:FLAGS] each. The run root must be among them."""
    workdir: Word | None = None
    """Working directory inside the container. null: that of the image."""
    env: tuple[Word, ...] = ()
    """Variables of the host that win over those of the image."""
    python: Word = "python3"
    """The interpreter inside the image; it must have ndctl installed."""


class HooksSpec(Struct, frozen=True, kw_only=True):
    """Lines of bash that run on each host in each run of the job. They have the job's variables and
    folder, and NDCTL_RUN_DIR and NDCTL_HOST."""

    before: Line | None = None
    """Runs before the host's agent starts. If it fails or times out, this run of the job does not
    use the host; the incident shows the end of its output."""
    after: Line | None = None
    """Runs when the host's ranks have ended in any way, unless the host itself died."""
    timeout: Seconds = 300.0
    """Seconds for `before`."""
    after_timeout: Seconds = 30.0
    """Seconds for `after`. If Slurm takes the hosts back, it allows at most KillWait."""


class SlurmSpec(Struct, frozen=True, kw_only=True):
    """Settings of a job on Slurm, in sbatch's own terms."""

    partition: Word | tuple[Word, ...] | None = None
    """One partition, or several from which Slurm chooses one. null: the cluster's default."""
    account: Word | None = None
    """Account that is charged. null: your default account."""
    qos: Word | None = None
    """Quality of service. null: the default of your account."""
    time: Count | Time | None = None
    """Time limit of one allocation. At its end the job is requeued until all steps are done. null:
    the partition's limit."""
    gpus: Literal["per-node", "gres", "none"] = "per-node"
    """How to request `cluster.gpus_per_host` devices: --gpus-per-node, --gres=gpu:N, or not at all
    (if ranks run on CPUs or `gres` requests them)."""
    gpu_type: Word | None = None
    """Type of GPU to request, such as `h100`. null: any type of the partition."""
    gres: Word | None = None
    """More generic resources, such as `nvme:1`."""
    cpus_per_task: Count | None = None
    """CPUs for the one task of a host. null: Slurm's default; with `exclusive` the whole host."""
    mem: Word | None = None
    """Memory of a host, such as `500G`; `0` is all of it."""
    exclusive: bool = True
    """Request whole hosts, which no other job shares."""
    constraint: Word | None = None
    """Features that the hosts must have, such as `h100&ib`."""
    nodelist: Word | None = None
    """Hosts that the allocation must contain, such as `node[01-04]`."""
    exclude: Word | None = None
    """Hosts that the job must not use. ndctl adds those that failed."""
    reservation: Word | None = None
    """Reservation from which the hosts come."""
    licenses: Word | None = None
    """Licenses that the job holds, such as `matlab:2`."""
    switches: Count | Word | None = None
    """COUNT[@WAIT]: at most COUNT leaf switches. null: what the plan requests."""
    switch_wait: Annotated[int, AtLeast(0)] | Time = "1:00"
    """How long the job may wait for the switches while hosts are idle, in minutes or in the format
    of `time`, if `switches` has no WAIT; `0`: not at all. Slurm's `max_switch_wait` (5 minutes by
    default) is another limit."""
    segment: Count | None = None
    """Number of hosts of a block that stay together (Slurm 23.11 or newer, block topology)."""
    comment: str | None = None
    """Comment that Slurm's accounting keeps with the job."""
    mail_type: Word | None = None
    """Occasions of Slurm's own mails, such as `END,FAIL`. `notify` tells more."""
    mail_user: Word | None = None
    """Who gets Slurm's own mails. null: you."""
    notice_s: Seconds = 90.0
    """How long before the time limit Slurm sends its signal (with the site's
    `preempt_send_user_signal` also before a preemption). Ranks have this time, less 45 s, for a
    checkpoint, even if `resilience.stop_grace` is less. A larger value does not help."""
    on_drain: Literal["auto", "finish", "checkpoint_and_requeue", "at_next_checkpoint"] = "auto"
    """When a host with ranks is drained: `auto` moves its ranks to a spare after the next step, and
    without a spare does as `finish`. `finish` trains on, which is Slurm's meaning, until
    maintenance starts there or the host is gone. `checkpoint_and_requeue` writes a checkpoint at
    once and continues without the host. `at_next_checkpoint` does so after the next checkpoint.
    Without spares, and without `shrink`, the job continues from the queue."""
    env: Mapping[str, Line] = field(default_factory=dict)
    """Variables of every agent and rank. Do not put secrets here: the batch script contains them as
    plain text."""
    group: Word | None = None
    """Unix group of the run directory and its files. You must be a member. null: your own group, or
    the one that the run root sets."""
    mode: Mode | None = None
    """Permissions of the run directory and its files: who may read (5) or write (7), for owner,
    group and others. The job's secret always stays readable by you alone. null: 700."""
    hooks: HooksSpec = field(default_factory=HooksSpec)
    """Commands of your own on each host, before and after the ranks."""
    modules: tuple[Word, ...] = ()
    """Environment modules that each host loads, as with `module load`."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run on the first host before the agents start."""
    container: ContainerSpec | None = None
    """Run agents and ranks in a container of pyxis. null: directly on the host."""
    sbatch_args: tuple[SbatchFlag, ...] = ()
    """More options of sbatch, one in each item, such as `--nice=5`. ndctl sets some itself."""
    srun_args: tuple[SrunFlag, ...] = ()
    """More options of the srun that starts the agents, such as `--mpi=none`."""
    snapshot: bool = False
    """Copy ndctl's code into the run directory and run it from there, so that an upgrade does not
    change a job that is requeued."""

    def __post_init__(self) -> None:
        problems = [bad_variable(name) for name in self.env]
        if self.partition == ():
            problems.append(
                Problem(
                    path="partition",
                    value=[],
                    limit="one partition or more",
                    fix="name one, or leave the key out for the cluster's default",
                )
            )
        if self.gpus != "none" and self.gres is not None:
            problems.append(_gpus_in(self.gres))
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
        """Names of the partitions; empty: the cluster's default."""
        given = (self.partition,) if isinstance(self.partition, str) else self.partition or ()
        return tuple(name for one in given for name in one.split(","))


def seconds(text: str) -> int | None:
    """Seconds of `MINUTES`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`; None for UNLIMITED or
    NONE."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # after "days-" come the hours
        hours, minutes, secs = (*parts, 0, 0)[:3]
    elif len(parts) < 3:  # sbatch reads "90" and "90:00" as minutes
        hours, minutes, secs = (0, *parts, 0)[:3]
    else:
        hours, minutes, secs = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def notice_too_long(notice_s: float, limit_s: int | None, whose: str) -> Problem | None:
    """A problem if Slurm's signal would come at the start of the allocation. The job would then be
    requeued before its first step, each time.

    Args:
        limit_s: time limit of the allocation; None or 0 (as in sbatch's --time): no limit.
        whose: the source of the limit.
    """
    if not limit_s or notice_s < limit_s:
        return None
    return Problem(
        path="notice_s",
        value=notice_s,
        limit=f"less than {limit_s} s, {whose}; otherwise Slurm sends its signal when the job"
        " starts, and the job is requeued before its first step, each time",
        fix=f"set cluster.slurm.time to more, or notice_s to {limit_s / 2:g} or less",
    )


def bad_variable(name: str) -> Problem | None:
    """A problem with the name of a variable that a spec must not set."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        limit, fix = "named with letters, digits and _, and no digit first", "rename it"
    elif name in OURS_OF_RANKS or name.startswith(OURS_BEGIN):
        limit, fix = "none that ndctl, torchrun or Slurm sets itself", "remove it"
    else:
        return None
    return Problem(path=f"env.{name}", value=name, limit=limit, fix=fix)


def plain_secrets(spec: SlurmSpec) -> tuple[str, ...]:
    """Keys of the spec that set a variable named like a secret to a plain text that is no path."""
    return tuple(f"env.{name}" for name, value in spec.env.items() if is_plain_secret(name, value))


def _gpus_in(gres: str) -> Problem | None:
    """A request for GPUs beside that of `cluster.gpus_per_host`."""
    found = re.search(r"(?:^|,)(?:gres[:/])?gpu(?::[A-Za-z][\w-]*)?(?::(\d+))?(?=,|$)", gres)
    if found is None:
        return None
    return Problem(
        path="gres",
        value=gres,
        limit="without GPUs, which cluster.gpus_per_host requests",
        fix=f"set cluster.gpus_per_host to {found[1] or 1}, and leave GPUs out of gres; with gpus:"
        " none, gres requests them instead",
    )

"""What a site's Slurm needs to be told of a job, in sbatch's own words."""

from dataclasses import dataclass
from typing import Annotated, Literal

from orchestrator.contract.limits import Matches
from orchestrator.contract.words import Count, Seconds

Word = Annotated[str, Matches(r"[^\s]+", "one word, without spaces", "train")]
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
class SlurmSpec:
    partition: Word | None = None
    """None: the cluster's default."""
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
    switches: Word | None = None
    """COUNT[@WAIT]: at most so many leaf switches. None: what the plan asks for."""
    segment: Count | None = None
    """Hosts of a block that stay together (Slurm 23.11 or newer with a block topology)."""
    comment: str | None = None
    mail_type: Word | None = None
    mail_user: Word | None = None
    notice_s: Seconds = 90.0
    """How long before the time limit (and with the site's `preempt_send_user_signal` before a
    preemption) Slurm warns: but for the last 45 s of it ranks have this long for a checkpoint, also
    where `resilience.stop_grace` is less; more of that does not help."""
    modules: tuple[Word, ...] = ()
    setup: tuple[str, ...] = ()
    """Lines of shell that run on the first host before the agents start."""
    container: ContainerSpec | None = None
    sbatch_args: tuple[SbatchFlag, ...] = ()
    srun_args: tuple[Flag, ...] = ()
    snapshot: bool = False
    """Copy ndctl's own code into the run directory and run from there, so that a later upgrade does
    not change a job that is requeued."""

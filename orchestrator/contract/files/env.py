"""Environment variables of agents and ranks. Each process reads them once, into a value."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

CONFIG_HOME = "XDG_CONFIG_HOME"
"""Folder of the user's settings; default `~/.config`."""
ATTEMPT = "NDCTL_ATTEMPT"
"""Number of this launch of all ranks, from 1."""
HEARTBEAT_SOCKET = "NDCTL_HEARTBEAT_SOCKET"
"""Path of the agent's Unix datagram socket; unset when no agent listens."""
TRACE_DIR = "NDCTL_TRACE_DIR"
"""Folder where a rank writes `rank-<r>.stacks` when it is asked; unset: to its standard error."""
DUMP_SIGNAL = signal.SIGRTMIN + 1
"""Asks a rank for its flight-recorder dump, `flight-<r>` in the trace directory."""
STACKS_SIGNAL = signal.SIGRTMIN + 3
"""Asks a rank for the Python stacks of its threads. One thread answers, so the GIL must be free."""
STACKS_IN_C = signal.SIGRTMIN + 6
"""The same where the GIL is not free: a C signal handler answers. While Python code runs in other
threads it may crash the rank, so only a rank that hangs gets this signal."""
EXIT_SIGNAL = signal.SIGRTMIN + 2
"""Makes a rank that runs the user's script exit with code 1, for a drill."""
DRILLS = "NDCTL_DRILLS"
"""JSON list of the drills that have not happened yet."""
SKIP = "NDCTL_SKIP"
"""JSON list of the windows of data that the job skips on purpose."""
RESUME = "NDCTL_RESUME"
"""`none`: start at step 0 and ignore checkpoints; else resume from the newest."""
HOST = "NDCTL_HOST"
"""Name of the host that the rank runs on."""
PACE = "NDCTL_PACE"
"""JSON of a `SavePace`: how often the job fails and how often it saves."""
SAFE_PATH = "PYTHONSAFEPATH"
"""Python's own: its value is not searched for modules in the folder of the script."""
RUN_DIR = "NDCTL_RUN_DIR"
"""The job's run directory. A user's script keeps its checkpoints and metrics there."""
KEEP = "NDCTL_KEEP"
"""JSON of the spec's `checkpoint` for a user's script: `keep`, `keep_every`, `verify`."""
MEMORY = "NDCTL_MEMORY"
"""JSON of a `HostMemory`: where ranks keep checkpoints in the memory of their host."""
PLACE = "NDCTL_PLACE"
"""JSON of a `Place`: set if the agent may keep the rank between two attempts."""
WAITS = "NDCTL_WAITS"
"""`1`: the rank waits for an order to join an attempt before it takes part in any."""
PROGRESS_FD = "NDCTL_PROGRESS_FD"
"""Descriptor of the memory that a rank shares with its watcher (`files/progress.py`)."""
TORCHRUN_PID = "NDCTL_TORCHRUN_PID"
"""Process id of torchrun. A watcher with another parent process is an orphan."""
RUN_ROOT = "NDCTL_RUN_ROOT"
"""Default of `--run-root` for every verb."""
INDEX = "NDCTL_INDEX"
"""Folder on a shared file system in which the jobs of all users are registered."""
PROFILE = "NDCTL_PROFILE"
"""File with the hardware profile of this machine's devices, for local jobs."""
SLURM_GPUS = "NDCTL_SLURM_GPUS"
"""File with a site's own names of GPUs in Slurm's gres types; tried before ndctl's table."""
KUBERNETES_GPUS = "NDCTL_KUBERNETES_GPUS"
"""File with a site's own names of GPUs in node labels; tried before ndctl's table."""
LOCAL_GPUS = "NDCTL_LOCAL_GPUS"
"""Devices of all hosts of a local job, by comma. An agent sees only those of its own host."""
SUBMISSION = "NDCTL_SUBMISSION"
"""Folder in a pod with the files of the submission."""
SLURM_OPTIONS = (
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SQUEUE_",
    "SLURM_TIME_FORMAT",
    "SLURM_TOPO_LEN",
)
"""Prefixes of variables with which a user sets options, filters and formats of Slurm's commands:
`SBATCH_PARTITION` overrides the batch script, `SQUEUE_STATES` hides jobs."""
SRUN_OPTIONS = (
    *("SLURM_BCAST", "SLURM_BCAST_EXCLUDE", "SLURM_COMPRESS", "SLURM_CONSTRAINT"),
    *("SLURM_CORE_SPEC", "SLURM_DEPENDENCY", "SLURM_EPILOG", "SLURM_EXACT", "SLURM_EXCLUSIVE"),
    *("SLURM_GRES", "SLURM_GRES_FLAGS", "SLURM_IMMEDIATE", "SLURM_LABELIO", "SLURM_MPI_TYPE"),
    *("SLURM_OVERLAP", "SLURM_PROLOG", "SLURM_REMOTE_CWD", "SLURM_RESV_PORTS", "SLURM_SEND_LIBS"),
    *("SLURM_STDINMODE", "SLURM_STEP_GRES", "SLURM_TASK_EPILOG", "SLURM_TASK_PROLOG"),
    *("SLURM_TEST_EXEC", "SLURM_THREAD_SPEC", "SLURM_THREADS", "SLURM_TIMELIMIT"),
    *("SLURM_USE_MIN_NODES", "SLURM_WORKING_DIR", "SRUN_CONTAINER", "SRUN_CPUS_PER_TASK"),
    "SRUN_EXPORT_ENV",
)
"""Variables with which a user sets options of srun that ndctl does not give, and which sbatch sets
for no job. `SLURM_MPI_TYPE=pmix` on a site without pmix ends each srun."""
STEP_DEFAULTS = (
    *("SLURM_CPU_FREQ_REQ", "SLURM_CPUS_PER_GPU", "SLURM_DIST_PLANESIZE", "SLURM_DISTRIBUTION"),
    *("SLURM_EXPORT_ENV", "SLURM_GPU_BIND", "SLURM_GPU_FREQ", "SLURM_GPUS", "SLURM_GPUS_PER_NODE"),
    *("SLURM_GPUS_PER_TASK", "SLURM_HINT", "SLURM_MEM_BIND", "SLURM_MEM_PER_CPU"),
    *("SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_NETWORK", "SLURM_NTASKS_PER_CORE"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_OVERCOMMIT", "SLURM_PROFILE"),
    "SLURM_THREADS_PER_CORE",
)
"""The same, but in a job they may be from options of its sbatch, so they stay there."""
TOKEN = "NDCTL_TOKEN"
"""The job's secret, if a backend cannot pass the file."""


class Place(Struct, frozen=True, kw_only=True):
    """Where the ranks of a host are among those of the job, if they may outlive the attempt.

    torchrun does not say it then: it knows its own host alone.
    """

    node_rank: int
    nodes: int
    address: str
    """Of the host of rank 0, which serves the store for the rendezvous of the ranks."""
    port: int


class RankEnv(Struct, frozen=True, kw_only=True):
    """Identity of this rank. With the defaults, `python -m trainer` alone is one rank of one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    attempt: int = 1
    host: str = ""
    heartbeat_socket: str = ""
    trace_dir: str = ""
    drills: str = "[]"
    skip: str = "[]"
    pace: str = "{}"
    resume: bool = True
    memory: str = ""
    progress_fd: int | None = None
    no_gpu: bool = False
    """GPUs are hidden from the rank on purpose."""
    waits: bool = False
    """It takes part in no attempt before it is ordered to."""
    place: Place | None = None
    """Given if the agent may keep this rank between two attempts."""

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> Self:
        place = msgspec.json.decode(environ[PLACE], type=Place) if PLACE in environ else None
        local, of_host = (int(environ.get(key, "0")) for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        first, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=first if place is None else place.node_rank * of_host + local,
            local_rank=local,
            world_size=size if place is None else place.nodes * of_host,
            local_world_size=max(1, of_host),
            waits=environ.get(WAITS) == "1",
            place=place,
            # Under `torchrun --max-restarts` without ndctl, torchrun itself restarts the ranks.
            attempt=int(environ.get(ATTEMPT, "1"))
            + int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            host=environ.get(HOST, ""),
            heartbeat_socket=environ.get(HEARTBEAT_SOCKET, ""),
            trace_dir=environ.get(TRACE_DIR, ""),
            drills=environ.get(DRILLS, "[]"),
            skip=environ.get(SKIP, "[]"),
            pace=environ.get(PACE, "{}"),
            resume=environ.get(RESUME) != "none",
            memory=environ.get(MEMORY, ""),
            progress_fd=int(environ[PROGRESS_FD]) if PROGRESS_FD in environ else None,
            no_gpu=hides_gpus(environ),
        )


def hides_gpus(environ: Mapping[str, str]) -> bool:
    return environ.get("CUDA_VISIBLE_DEVICES") == ""


def without_slurm_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for Slurm's commands, so that they behave the same for every user."""
    ours = SRUN_OPTIONS if _is_in_slurm_job(environ) else (*SRUN_OPTIONS, *STEP_DEFAULTS)
    return {
        name: text
        for name, text in environ.items()
        if not name.startswith(SLURM_OPTIONS) and name not in ours
    }


def ignored_slurm_options(environ: Mapping[str, str]) -> list[str]:
    """Variables by which a user wanted to change a job, and which `without_slurm_options` removes.
    In a Slurm job those of srun may be from Slurm itself."""
    ours = () if _is_in_slurm_job(environ) else (*SRUN_OPTIONS, *STEP_DEFAULTS)
    return sorted(name for name in environ if name.startswith("SBATCH_") or name in ours)


def _is_in_slurm_job(environ: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in environ


def nccl_pipes(heartbeat_socket: str, attempt: int) -> str:
    """Prefix of the names of the pipes by which NCCL's monitor of each rank can be asked for a
    dump, even if the rank holds the GIL. They are beside the agent's socket, because not every file
    system of a run directory supports pipes."""
    return str(Path(heartbeat_socket).parent / f"attempt-{attempt}-rank-")


def nccl_pipe(heartbeat_socket: str, attempt: int, rank: int) -> Path:
    return Path(f"{nccl_pipes(heartbeat_socket, attempt)}{rank}.pipe")


def user_config_file(environ: Mapping[str, str]) -> Path | None:
    """The user's settings, which need not exist; None if the environment names no home folder."""
    base = Path(environ.get(CONFIG_HOME, ""))
    if not base.is_absolute():  # the XDG specification: a relative path is invalid and ignored
        home = Path(environ.get("HOME", ""))
        if not home.is_absolute():
            return None
        base = home / ".config"
    return base / "ndctl" / "config.yaml"


def has_user_config(environ: Mapping[str, str]) -> bool:
    """Whether `specs.user_config` has to be asked; without settings nobody waits for its import.
    Also true if that cannot be seen, in a folder of another user: then it says so."""
    file = user_config_file(environ)
    try:
        return file is not None and bool(file.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True

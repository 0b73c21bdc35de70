"""Environment variables between agent and rank, read once into a value."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ATTEMPT = "NDCTL_ATTEMPT"
"""Which launch of all ranks this is, from 1."""
HEARTBEAT_SOCKET = "NDCTL_HEARTBEAT_SOCKET"
"""Path of the agent's Unix datagram socket; unset when no agent listens."""
TRACE_DIR = "NDCTL_TRACE_DIR"
"""Where a rank writes `rank-<r>.stacks` on SIGUSR2; unset: to its standard error."""
DUMP_SIGNAL = signal.SIGRTMIN + 1
"""Asks a rank for its flight-recorder dump, `flight-<r>` in the trace directory."""
DRILLS = "NDCTL_DRILLS"
"""JSON list of the drills that are still to happen."""
SKIP = "NDCTL_SKIP"
"""JSON list of the windows of data that the job leaves out on purpose."""
RESUME = "NDCTL_RESUME"
"""`none`: begin at step 0, whatever checkpoints there are; else from the newest."""
HOST = "NDCTL_HOST"
"""Name of the host that the rank runs on."""
PACE = "NDCTL_PACE"
"""JSON of a `SavePace`: what is known of how often the job breaks and how often it saves."""
PROGRESS_FD = "NDCTL_PROGRESS_FD"
"""Descriptor of what a rank writes each step into, for its keeper (`files/progress.py`)."""
TORCHRUN_PID = "NDCTL_TORCHRUN_PID"
"""torchrun's process: a keeper with another parent is an orphan."""
RUN_ROOT = "NDCTL_RUN_ROOT"
"""Default of `--run-root` for every verb."""
SLURM_GPUS = "NDCTL_SLURM_GPUS"
"""A site's own table of what GPUs Slurm's gres types are, before ndctl's."""
KUBERNETES_GPUS = "NDCTL_KUBERNETES_GPUS"
"""A site's own table of what GPUs its nodes' labels stand for, before ndctl's."""
SUBMISSION = "NDCTL_SUBMISSION"
"""Where a pod finds what its job was handed over as."""
SLURM_HABITS = (
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SQUEUE_",
    "SLURM_TIME_FORMAT",
    "SLURM_TOPO_LEN",
)
"""How the names begin by which a user gives Slurm's commands options, filters and formats of his
own: `SBATCH_PARTITION` goes before what a script says, `SQUEUE_STATES` hides jobs."""
TOKEN = "NDCTL_TOKEN"
"""The job's token, where a backend cannot hand over the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """Who this rank is; the defaults make a lone `python -m trainer` one rank of one."""

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
    progress_fd: int | None = None
    no_gpu: bool = False
    """GPUs that there may be are hidden from it on purpose."""

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> Self:
        return cls(
            rank=int(environ.get("RANK", "0")),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            world_size=int(environ.get("WORLD_SIZE", "1")),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            # Under `torchrun --max-restarts` without ndctl, torchrun alone starts ranks again.
            attempt=int(environ.get(ATTEMPT, "1"))
            + int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            host=environ.get(HOST, ""),
            heartbeat_socket=environ.get(HEARTBEAT_SOCKET, ""),
            trace_dir=environ.get(TRACE_DIR, ""),
            drills=environ.get(DRILLS, "[]"),
            skip=environ.get(SKIP, "[]"),
            pace=environ.get(PACE, "{}"),
            resume=environ.get(RESUME) != "none",
            progress_fd=int(environ[PROGRESS_FD]) if PROGRESS_FD in environ else None,
            no_gpu=hides_gpus(environ),
        )


def hides_gpus(environ: Mapping[str, str]) -> bool:
    return environ.get("CUDA_VISIBLE_DEVICES") == ""


def without_habits(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands may see: so they mean the same for everybody."""
    return {name: said for name, said in environ.items() if not name.startswith(SLURM_HABITS)}


def nccl_pipes(heartbeat_socket: str, attempt: int) -> str:
    """How the names of the pipes begin at which NCCL's monitor of each rank can be asked for a
    dump, GIL or no GIL: beside the agent's socket, as not every run directory can hold a pipe."""
    return str(Path(heartbeat_socket).parent / f"attempt-{attempt}-rank-")


def nccl_pipe(heartbeat_socket: str, attempt: int, rank: int) -> Path:
    return Path(f"{nccl_pipes(heartbeat_socket, attempt)}{rank}.pipe")

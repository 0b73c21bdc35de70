"""Prevents two jobs from writing the same checkpoints and metrics: by a fence under ndctl, and by a
lock under plain torchrun."""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ndctl.rank.fence import Admit, admit_all, admit_attempt
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.read_json import read_json
from orchestrator.errors import TrainingError
from trainer.rank.ranks import broadcast_from_rank0

LOG = logging.getLogger("trainer")


def admit_of(run: RunDir, env: RankEnv) -> Admit:
    """The fence check of this rank. Without ndctl (plain torchrun) there is no fence."""
    return admit_attempt(run.fence, env.attempt) if env.heartbeat_socket else admit_all


@contextmanager
def lock_out(out: Path, env: RankEnv) -> Iterator[None]:
    """Hold the lock of the folder `out` on rank 0. All ranks must call it.

    Raises:
        TrainingError: another job holds it, or `out` cannot be written.
    """
    if env.heartbeat_socket:
        yield
        return
    fd = broadcast_from_rank0(lambda: lock_file(RunDir(out).trainer_lock))
    try:
        yield
    finally:
        if env.rank == 0:
            # Forks of this rank may live longer, so the lock is not left to the kernel.
            os.close(fd)


def lock_file(path: Path) -> int:
    """Lock `path`, and write there which process holds it. Returns the open file descriptor.

    The file is never removed: a process that has opened a removed file and one that creates it
    again would both get the lock.

    Raises:
        TrainingError: as `lock_out`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Open for writing, which NFS requires for an exclusive lock.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise TrainingError(
            f"failed to write to out={path.parent}: {exc}", fix="set out to a folder that you own"
        ) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise _in_use(path) from None
    except OSError as exc:
        # Lustre without `-o flock`, some FUSE file systems. The lock is only a safeguard.
        LOG.warning(
            "failed to lock %s: %s; a second job with the same out is not noticed", path, exc
        )
        return fd
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": since}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)
    os.fsync(fd)  # so that hosts that mount the folder by NFS can read it
    return fd


def _in_use(path: Path) -> TrainingError:
    try:
        holder = read_json(path.read_text())
        pid, host, since = holder["pid"], holder["host"], holder["since"]
    except (OSError, ValueError, KeyError, TypeError):
        # It was locked a moment ago, and its holder is not written yet.
        who, end = "another process", "end that job"
    else:
        who = f"process {pid} on {host}, since {since}"
        end = f"end that job (`kill {pid}` on {host} lets it write a checkpoint first)"
    return TrainingError(
        f"another job trains in out={path.parent}: {who} holds {path.name}",
        fix=f"wait for that job, {end}, or set out to another folder",
    )

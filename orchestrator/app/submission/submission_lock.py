"""A lock that allows one submission of a job at a time, from the first check until the scheduler
has the job.

The lock file is next to the run directory, not in it, because `--new` moves the run directory. The
file exists as long as the run directory.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.command_hints import Commands
from orchestrator.errors import JobError
from orchestrator.posix.denied import user_of
from orchestrator.posix.locks import is_held_alone, try_lock
from orchestrator.posix.owners import ANOTHER, is_trusted


@contextmanager
def submission_lock(run_dir: RunDir) -> Iterator[None]:
    """Raises JobError while another process submits the job, and OSError."""
    path = run_dir.submission_lock
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _locked(path)
    if fd is None:
        raise _being_submitted(run_dir)
    try:
        yield
    finally:
        if not run_dir.path.exists():  # the submission was refused, so no file stays
            path.unlink()
        os.close(fd)


def _locked(path: Path) -> int | None:
    """The open and locked file; None while another process holds the lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not try_lock(fd):
            os.close(fd)
            return None
        # The last holder may have removed the file after it was opened here. Then the next process
        # would create a new file, and two processes would hold a lock. So compare and try again.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


def refuse_while_submitting(run_dir: RunDir) -> None:
    """Raises JobError while a process submits the job."""
    if is_held_alone(run_dir.submission_lock):
        raise _being_submitted(run_dir)


def _being_submitted(run_dir: RunDir) -> JobError:
    status = Commands(job=run_dir.path.name, root=("--run-root", str(run_dir.path.parent)))
    path, whose, also = run_dir.submission_lock, "", ""
    with suppress(OSError):
        found = path.lstat()
        if not is_trusted(path, found):
            whose = f": it holds {path} of {user_of(found)}"
            also = f", or {ANOTHER}"
    return JobError(
        f"job {run_dir.path.name} is being submitted by another process{whose}",
        fix=f"wait until it is done; then see `{status.of('status')}`{also}",
    )

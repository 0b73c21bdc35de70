"""One submission of a job at a time: from the look at what there is until a scheduler has it.

The file lies beside the run directory, which `--new` puts aside. It stays there as long as there is
a run directory.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.command_hints import Commands
from orchestrator.errors import JobError
from orchestrator.posix.locks import is_held_alone, try_lock


@contextmanager
def alone(run_dir: RunDir) -> Iterator[None]:
    """Raises JobError while another process submits the job, and OSError."""
    path = run_dir.submission_lock
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _locked(path)
    if fd is None:
        raise _being_submitted(run_dir)
    try:
        yield
    finally:
        if not run_dir.path.exists():  # the submission was refused: nothing of it stays
            path.unlink()
        os.close(fd)


def _locked(path: Path) -> int | None:
    """The file open and locked; None while another process holds it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not try_lock(fd):
            os.close(fd)
            return None
        # Its last holder may have removed it after it was opened here: the next one would make a
        # new file, and two would hold a lock of that name.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


def refuse_while_submitting(run_dir: RunDir) -> None:
    """Raises JobError while some process submits the job."""
    if is_held_alone(run_dir.submission_lock):
        raise _being_submitted(run_dir)


def _being_submitted(run_dir: RunDir) -> JobError:
    status = Commands(job=run_dir.path.name, root=("--run-root", str(run_dir.path.parent)))
    return JobError(
        f"job {run_dir.path.name} is being submitted by another process",
        fix=f"wait for its answer; then `{status.of('status')}` says how the job stands",
    )

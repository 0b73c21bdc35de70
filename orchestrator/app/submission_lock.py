"""One submission of a job at a time: from the look at what there is until a scheduler has it.

The file lies beside the run directory, which `--new` puts aside, and stays there: to remove it
would let two hold it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.contract.rundir import RunDir
from orchestrator.dashboard.commands import Commands
from orchestrator.errors import JobError
from orchestrator.locks import is_held_alone, try_lock


@contextmanager
def alone(run_dir: RunDir) -> Iterator[None]:
    """Raises JobError while another process submits the job, and OSError."""
    path = _path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not try_lock(fd):
            raise _being_submitted(run_dir)
        yield
    finally:
        os.close(fd)


def refuse_while_submitting(run_dir: RunDir) -> None:
    """Raises JobError while some process submits the job."""
    if is_held_alone(_path(run_dir)):
        raise _being_submitted(run_dir)


def _path(run_dir: RunDir) -> Path:
    return run_dir.path.with_name(f".{run_dir.path.name}.submitting")


def _being_submitted(run_dir: RunDir) -> JobError:
    status = Commands(job=run_dir.path.name, root=("--run-root", str(run_dir.path.parent)))
    return JobError(
        f"job {run_dir.path.name} is being submitted by another process",
        fix=f"wait for its answer; then `{status.of('status')}` says how the job stands",
    )

"""Registers a job that was just submitted."""

import functools
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.registry.entry import Entry
from orchestrator.registry.store import register


def register_job(
    job: JobSubmitted, run_dir: Path, at: float, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Returns warnings, as `register`.

    Args:
        run_dir: the run directory as this machine sees it, or its copy here.
        at: time of the submission in Unix seconds.
    """
    return register(entry_of(job, run_dir, at), environ)


def entry_of(job: JobSubmitted, run_dir: Path, at: float) -> Entry:
    launch = job.launch
    return Entry(
        name=run_dir.name,
        run_dir=str(run_dir.absolute()),
        user=user_name(os.geteuid()),
        machine=os.uname().nodename,
        backend=job.backend,
        at=at,
        hosts=len(job.plan.hosts),
        gpus=len(job.plan.hosts) * launch.devices_per_host,
    )


@functools.cache
def user_name(number: int) -> str:
    """The name of a user; the number if this machine does not know the name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)

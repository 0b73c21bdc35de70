"""Finds jobs that exist."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ndctl.client.errors import JobError, explained
from ndctl.client.job import Job
from orchestrator.system import SystemClock

if TYPE_CHECKING:
    from orchestrator.app.remote import Place


@explained
def job(
    name: str | os.PathLike[str],
    *,
    run_root: str | os.PathLike[str] | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> Job:
    """The job `name`, as `ndctl status NAME` finds it.

    Args:
        name: its name, or its run directory.
        run_root: folder of the run directories. None: `NDCTL_RUN_ROOT`, else `ndctl-runs`.
        context: search the cluster of this context of the kubeconfig.
        namespace: search this namespace of the cluster.

    Raises:
        JobError: no job or several jobs have this name.
    """
    from orchestrator.app import remote

    if not isinstance(name, str | os.PathLike):
        raise JobError(f"the job is {name!r}", fix="give its name, or its run directory")
    root = _root(run_root)
    found = remote.find(
        root, os.fspath(name), _place(context, namespace), os.environ, SystemClock()
    )
    return Job(found.run_dir.path)


@explained
def jobs(
    pattern: str = "*",
    *,
    run_root: str | os.PathLike[str] | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> list[Job]:
    """The jobs whose names match a shell pattern such as `sweep-*`, sorted by name.

    The arguments are those of `ndctl.job`. Submissions that did not finish are left out.
    """
    from orchestrator.app import remote
    from orchestrator.journal.snapshot import replay

    place, clock = _place(context, namespace), SystemClock()
    matching = remote.every(_root(run_root), pattern, place, os.environ, clock)
    remote.refresh_all(matching)
    found = [Job(one.run_dir.path) for one in matching if replay(one.run_dir).job is not None]
    return sorted(found, key=lambda one: one.name)


def _root(run_root: str | os.PathLike[str] | None) -> Path:
    from orchestrator.job_paths import run_root_of

    return run_root_of(None if run_root is None else os.fspath(run_root), os.environ)


def _place(context: str | None, namespace: str | None) -> "Place | None":
    from orchestrator.app.remote import Place

    if context is None and namespace is None:
        return None
    return Place(context=context, namespace=namespace)

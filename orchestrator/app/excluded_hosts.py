"""Hosts that jobs do not use because of strikes or a pin: reason, end, and command to undo it."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from orchestrator.app.schedulers import scheduler_of
from orchestrator.errors import BackendError
from orchestrator.job.stage import OUTSIDE
from orchestrator.job.state import Run
from orchestrator.job_paths import run_root_of
from orchestrator.seams import Clock, LaunchStatus, RemoteScheduler, Scheduler

if TYPE_CHECKING:
    from orchestrator.host_strikes import Record


class ExcludedHost(Struct, frozen=True, kw_only=True):
    name: str
    why: str
    """For example `until 2026-11-25 03:00:00 UTC: 2 strikes, last host-lost in llama: ...`."""
    undo: str
    """The command that lets jobs use it."""

    def __str__(self) -> str:
        return f"{self.name} is excluded ({self.why}); to use it: {self.undo}"


def excluded_hosts(
    run_root: Path, backend: Scheduler, environ: Mapping[str, str], clock: Clock
) -> tuple[ExcludedHost, ...]:
    """Hosts excluded by strikes and pins in the run root, for the cluster of the backend."""
    from orchestrator import host_strikes

    if isinstance(backend, RemoteScheduler):
        return ()  # strikes are in the run root, which only the pods see: the leader reads them
    if not _may_exist(run_root / host_strikes.FOLDER):
        return ()  # no need to ask the scheduler for the name of its cluster
    cluster = backend.cluster()
    path = host_strikes.path_of(run_root, cluster)
    return tuple(
        ExcludedHost(
            name=record.host,
            why=host_strikes.describe(record, None).removeprefix("excluded "),
            undo=_undo(record, cluster, run_root, environ),
        )
        for record in host_strikes.excluded_records(path, clock.now())
    )


def excluded_while_queued(
    run: Run, seen: LaunchStatus, environ: Mapping[str, str], clock: Clock
) -> dict[str, str]:
    """Hosts that a queued job excludes, each with the reason and the command to use it.

    Clearing strikes is not enough, because the request at the scheduler names the host.
    """
    if run.job is None or not seen.excluded:
        return {}
    root = Path(run.job.launch.run_dir).parent
    struck: dict[str, ExcludedHost] = {}
    with suppress(BackendError):
        backend = scheduler_of(run.job.backend, environ, clock)
        struck = {one.name: one for one in excluded_hosts(root, backend, environ, clock)}
    found = {}
    for name, command in seen.excluded.items():
        if name in struck:
            one = struck[name]
            found[name] = f"is excluded ({one.why}); to use it: {one.undo} && {command}"
        else:
            why = _why_by_the_job(run, name)
            found[name] = f"is excluded by this job ({why}); to use it: {command}"
    return found


def _why_by_the_job(run: Run, host: str) -> str:
    """The incident or other reason in the journal."""
    last = (
        run.history.incidents[-1] if run.history.incidents else None
    )  # earlier ones had their own requeue
    ours = last is not None and last.culprit.host == host
    incident = f"incident #{last.id} {last.kind}" if last is not None and ours else ""
    if words := run.hosts.exclude.get(host):
        return f"{incident}: {words}" if incident else words
    if host == run.scheduler.leader and not isinstance(run.stage, OUTSIDE):
        # No leader has started since, so the journal has no reason yet.
        return "its leader was lost, and the agents requested a requeue without it"
    return incident or "there is no longer a reason to exclude it"


def _undo(record: "Record", cluster: str, run_root: Path, environ: Mapping[str, str]) -> str:
    """The command names the cluster if the run root has several, whose hosts may share names."""
    from orchestrator import host_strikes

    here = run_root_of(None, environ).absolute() == run_root.absolute()
    root = () if here else ("--run-root", str(run_root.absolute()))
    if record.pin is not None:
        return shlex.join(["ndctl", "hosts", *root, "unpin", record.host])
    files = (run_root / host_strikes.FOLDER).glob("*.jsonl")
    others = [path for path in files if path.stem not in (cluster, host_strikes.LOCAL)]
    which = ("--cluster", cluster) if others else ()
    return shlex.join(["ndctl", "hosts", *root, "clear", record.host, *which])


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # reading the file reports the error
        return True

"""Hosts that ndctl keeps its jobs off, by strikes or a pin: why, until when, and what undoes it."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.app.schedulers import scheduler_of
from orchestrator.errors import BackendError
from orchestrator.job.stage import OUTSIDE
from orchestrator.job.state import Run
from orchestrator.job_paths import run_root_of
from orchestrator.seams import Clock, RemoteScheduler, Scheduler, Sighting

if TYPE_CHECKING:
    from orchestrator.host_strikes import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedHost:
    name: str
    why: str
    """As in `until 2026-11-25 03:00:00 UTC: 2 strikes, last host-lost in llama: ...`."""
    undo: str
    """The command that lets jobs use it."""

    def __str__(self) -> str:
        return f"{self.name} is excluded ({self.why}); to use it: {self.undo}"


def excluded_hosts(
    run_root: Path, backend: Scheduler, environ: Mapping[str, str], clock: Clock
) -> tuple[ExcludedHost, ...]:
    """By the strikes and pins of the run root for the backend's cluster."""
    from orchestrator import host_strikes

    if isinstance(backend, RemoteScheduler):
        return ()  # the run root, where they are counted, is for the pods to see: the leader asks
    if not _may_exist(run_root / host_strikes.FOLDER):
        return ()  # without asking the scheduler its name
    cluster = backend.cluster()
    path = host_strikes.path_of(run_root, cluster)
    return tuple(
        ExcludedHost(
            name=record.host,
            why=host_strikes.describe(record).removeprefix("excluded "),
            undo=_undo(record, cluster, run_root, environ),
        )
        for record in host_strikes.excluded_records(path, clock.now())
    )


def excluded_while_queued(
    run: Run, seen: Sighting, environ: Mapping[str, str], clock: Clock
) -> dict[str, str]:
    """Hosts that a job in a queue does without: each with why, and what to type to use it.

    To forget its strikes alone does not change what the scheduler was asked for.
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
    """By which incident, or what else the journal knows."""
    last = run.incidents[-1] if run.incidents else None  # one before has had its own requeue
    ours = last is not None and last.culprit.host == host
    incident = f"incident #{last.id} {last.kind}" if last is not None and ours else ""
    if words := run.exclude.get(host):
        return f"{incident}: {words}" if incident else words
    if host == run.leader and run.stage not in OUTSIDE:
        # No leader has begun since that could have written it down.
        return "the leader there is gone, and its agents asked for a run without it"
    return incident or "nothing is held against it any more"


def _undo(record: "Record", cluster: str, run_root: Path, environ: Mapping[str, str]) -> str:
    """For that cluster alone: a run root may serve several, whose hosts have the same names."""
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
    except OSError:  # the reader of the file says what is wrong
        return True

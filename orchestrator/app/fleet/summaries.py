"""A summary of each job, quickly: a journal is read again only if it has changed.

A site has thousands of jobs that ended long ago. Their summaries are kept in one file in the user's
state folder, with the sizes and times of the files that they were made from. The file can be
removed at any time.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.app.fleet.known_jobs import KnownJob
from orchestrator.app.remote import Found
from orchestrator.app.snapshots import with_scheduler
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.fleet.summary import JobSummary, summary_of
from orchestrator.dashboard.scheduler_status import is_quiet
from orchestrator.dashboard.snapshot import Snapshot, read_snapshot
from orchestrator.errors import NdctlError
from orchestrator.journal.journal import has_writer
from orchestrator.registry.store import state_folder
from orchestrator.seams import Clock

VERSION = 3
"""Raised when a summary of the same files would differ."""
FILE = "summaries.json"
MOST_BYTES = 64 << 20

REPORTS_S = 60.0
"""A leader reports every 10 s. After so long without a report, the state is shown with its age."""

Stamp = tuple[int, ...]
"""Sizes and times of the files of a job."""


class Cached(Struct, frozen=True):
    stamp: Stamp
    summary: JobSummary


class Summaries(Struct, frozen=True):
    v: int = VERSION
    jobs: dict[str, Cached] = field(default_factory=dict)
    """Run directory -> its summary."""


class Reader:
    """Reads summaries. It lives for one command; `list --watch` reads many times."""

    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        self.environ, self.clock = environ, clock
        folder = state_folder(environ)
        self._path = None if folder is None else folder / FILE
        self._known = dict(_load(self._path).jobs)
        self._changed = False

    def rows(self, jobs: Sequence[KnownJob]) -> tuple[list[JobRow], list[Snapshot]]:
        """A row for each job whose submission is complete, and the snapshots that were read."""
        summaries: dict[int, JobSummary] = {}
        problems: dict[int, str] = {}
        unread: list[tuple[int, Found, Snapshot]] = []
        stamps: dict[int, Stamp] = {}
        for at, job in enumerate(jobs):
            if job.found is None:
                continue
            try:
                stamps[at] = _stamp(job.found.run_dir)
                summary = self._recall(job.found, stamps[at])
                if summary is not None:
                    summaries[at] = summary
                elif (seen := read_snapshot(job.found.run_dir, self.clock.now())) is not None:
                    unread.append((at, job.found, seen))
            except (OSError, NdctlError) as exc:
                problems[at] = exc.message if isinstance(exc, NdctlError) else str(exc)
        asked = with_scheduler([(f, s) for _, f, s in unread], self.environ, self.clock)
        for (at, found, _), seen in zip(unread, asked, strict=True):
            summaries[at] = summary_of(seen)
            self._keep(found, stamps[at], summaries[at])
        self._save()
        now = self.clock.now()
        for at, job in enumerate(jobs):
            if at not in summaries and job.report is not None:
                summary = _reported(job.report, now)
                # A folder that does not exist here may exist where the job runs.
                if not job.gone or not (summary.is_over or summary.as_of):
                    summaries[at] = summary
        rows = [_row(job, summaries.get(at), problems.get(at, "")) for at, job in enumerate(jobs)]
        return [row for row in rows if row is not None], asked

    def _recall(self, found: Found, stamp: Stamp) -> JobSummary | None:
        cached = self._known.get(str(found.run_dir.path))
        if cached is None or cached.stamp != stamp:
            return None
        summary = cached.summary
        if summary.is_over:
            return summary
        # The leader writes the journal, so the state is that of the journal while it lives. Only a
        # job that stands still may be suspended, which the scheduler knows.
        quiet = is_quiet(summary.updated_at, self.clock.now()) and summary.backend != "local"
        alive = found.stale is None and has_writer(found.run_dir.journal)
        return summary if alive and summary.leader_alive and not quiet else None

    def _keep(self, found: Found, stamp: Stamp, summary: JobSummary) -> None:
        if summary.as_of is not None or not (summary.is_over or summary.leader_alive):
            return  # it says what a scheduler said, which may change
        if summary.is_over and summary.leader_alive:
            return  # the leader may still write
        try:
            msgspec.json.encode(summary)
        except UnicodeEncodeError:
            return  # a lone surrogate, which msgspec cannot write: its journal is read each time
        self._known[str(found.run_dir.path)] = Cached(stamp, summary)
        self._changed = True

    def _save(self) -> None:
        if not self._changed or self._path is None:
            return
        self._changed = False
        there = {path: one for path, one in self._known.items() if Path(path).exists()}
        with contextlib.suppress(OSError):  # the next command reads the journals again
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path, msgspec.json.encode(Summaries(jobs=there)))


def _reported(report: JobSummary, now: float) -> JobSummary:
    """A job that only its leader's reports tell about. They stop when the leader dies."""
    fresh = report.is_over or now - report.updated_at <= REPORTS_S
    return replace(report, as_of=None if fresh else report.updated_at)


def _load(path: Path | None) -> Summaries:
    try:
        if path is None or path.stat().st_size > MOST_BYTES:
            return Summaries()
        found = msgspec.json.decode(path.read_bytes(), type=Summaries)
    except (OSError, ValueError, RecursionError):
        return Summaries()
    return found if found.v == VERSION else Summaries()


def _stamp(run_dir: RunDir) -> Stamp:
    """Raises OSError if there is no journal."""
    stamp: list[int] = []
    for path in (run_dir.journal, run_dir.metrics, run_dir.report):
        try:
            seen = os.stat(path)  # noqa: PTH116 - thousands of calls
            stamp += (seen.st_ino, seen.st_size, seen.st_mtime_ns)
        except FileNotFoundError:
            if path == run_dir.journal:
                raise
            stamp.append(0)
    return tuple(stamp)


def _row(job: KnownJob, summary: JobSummary | None, problem: str) -> JobRow | None:
    """None for a job whose submission did not finish."""
    entry = job.entry
    if summary is not None:
        return JobRow(
            name=job.path.name,
            user=job.user,
            run_dir=str(job.path),
            backend=summary.backend,
            hosts=summary.hosts,
            gpus=summary.gpus,
            submitted_at=summary.submitted_at,
            job=summary,
            archived=job.archived,
        )
    problem = problem or job.problem
    if not problem:
        return None
    return JobRow(
        name=job.path.name,
        user=job.user,
        run_dir=str(job.path),
        backend="" if entry is None else entry.backend,
        hosts=0 if entry is None else entry.hosts,
        gpus=0 if entry is None else entry.gpus,
        submitted_at=0.0 if entry is None else entry.at,
        job=None,
        problem=problem,
        gone=job.gone,
        archived=job.archived,
    )

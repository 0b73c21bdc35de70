"""A summary of each job, quickly: a journal is read again only if it has changed.

A site has thousands of jobs that ended long ago. Their summaries are kept in one file in the user's
state folder, with the sizes and times of the files that they were made from. The file can be
removed at any time.
"""

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.app.fleet.known_jobs import KnownJob, Scope, known_jobs
from orchestrator.app.remote import Found
from orchestrator.app.snapshots import with_scheduler
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.fleet.row import JobRow, row_of
from orchestrator.dashboard.fleet.summary import JobSummary, summary_of
from orchestrator.dashboard.job_view.standing import Standing
from orchestrator.dashboard.scheduler_status import is_quiet
from orchestrator.dashboard.snapshot import Snapshot, read_snapshot
from orchestrator.errors import NdctlError
from orchestrator.journal.journal import has_writer
from orchestrator.posix.crew import Crew, Task
from orchestrator.registry.store import state_folder
from orchestrator.seams import Clock

VERSION = 4
"""Raised when a summary of the same files would differ."""
FILE = "summaries.json"
MOST_BYTES = 64 << 20

BATCH = 256
"""So many journals are read before their schedulers are asked, and then forgotten."""
GONE_S = 10.0
"""Limit for looking which run directories no longer exist."""
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
        self.crew = Crew()
        """Looks into run directories, because the storage of one may hang."""
        folder = state_folder(environ)
        self._path = None if folder is None else folder / FILE
        self._known = dict(_load(self._path).jobs)
        self._changed = False

    def rows(self, jobs: Sequence[KnownJob]) -> tuple[list[JobRow], list[Standing]]:
        """A row for each job whose submission is complete, and the states that are unknown now."""
        summaries: dict[int, JobSummary] = {}
        problems: dict[int, str] = {}
        unread: list[tuple[int, Found, Stamp]] = []
        there: set[str] = set()
        for at, job in enumerate(jobs):
            if job.found is None:
                continue
            try:
                stamp = _stamp(job.found.run_dir)
            except OSError as exc:
                problems[at] = str(exc)
                continue
            there.add(str(job.path))
            if (summary := self._recall(job.found, stamp)) is not None:
                summaries[at] = summary
            else:
                unread.append((at, job.found, stamp))
        unknown: list[Standing] = []
        try:
            for batch in (unread[at : at + BATCH] for at in range(0, len(unread), BATCH)):
                unknown += self._read(batch, summaries, problems)
        finally:  # what was read before Ctrl-C need not be read again
            self._save(there)
        now = self.clock.now()
        for at, job in enumerate(jobs):
            if at not in summaries and job.report is not None:
                summary = _reported(job.report, now)
                # A folder that does not exist here may exist where the job runs.
                if not job.gone or not (summary.is_over or summary.as_of):
                    summaries[at] = summary
        rows = [_row(job, summaries.get(at), problems.get(at, "")) for at, job in enumerate(jobs)]
        return [row for row in rows if row is not None], unknown

    def _read(
        self,
        batch: Sequence[tuple[int, Found, Stamp]],
        summaries: dict[int, JobSummary],
        problems: dict[int, str],
    ) -> list[Standing]:
        """Read journals, and ask each scheduler once. Returns the states that are unknown now."""
        read: list[tuple[int, Found, Stamp, Snapshot]] = []
        for at, found, stamp in batch:
            try:
                seen = read_snapshot(found.run_dir, self.clock.now())
            except (OSError, NdctlError) as exc:
                problems[at] = exc.message if isinstance(exc, NdctlError) else str(exc)
            else:
                read += [] if seen is None else [(at, found, stamp, seen)]
        asked = with_scheduler([(found, s) for _, found, _, s in read], self.environ, self.clock)
        for (at, found, stamp, _), seen in zip(read, asked, strict=True):
            summaries[at] = summary_of(seen)
            self._keep(found, stamp, summaries[at])
        standings = (seen.standing for seen in asked)
        return [standing for standing in standings if standing.as_of is not None]

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

    def _save(self, there: Collection[str]) -> None:
        """Write the summaries. `there`: run directories that exist."""
        if not self._changed or self._path is None:
            return
        self._changed = False
        gone = self._gone([path for path in self._known if path not in there])
        kept = {path: one for path, one in self._known.items() if path not in gone}
        with contextlib.suppress(OSError):  # the next command reads the journals again
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._path, msgspec.json.encode(Summaries(jobs=kept)))

    def _gone(self, paths: Sequence[str]) -> set[str]:
        """Those of these folders that do not exist. Of storage that hangs this is not known."""
        gone: set[str] = set()

        def look(path: str) -> None:
            if not Path(path).exists():
                gone.add(path)

        self.crew.give_all(
            Task(("gone", path), partial(look, path), Path(path).parent) for path in paths
        )
        self.crew.wait(GONE_S)
        return set(gone)


def with_number(number: str, environ: Mapping[str, str], clock: Clock) -> str | None:
    """The name of the job that has this number at its scheduler."""
    rows, _ = Reader(environ, clock).rows(known_jobs(Scope(), environ, clock))
    at_scheduler = re.compile(rf"\b{number}\b")
    told = ((row.name, row.job.scheduler) for row in rows if row.job is not None)
    return next((name for name, words in told if words and at_scheduler.search(words)), None)


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
        return row_of(job.path, job.user, summary, archived=job.archived)
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
        problem=problem,
        gone=job.gone,
        archived=job.archived,
    )

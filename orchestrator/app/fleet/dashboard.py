"""`ndctl dashboard` with keys: reads jobs for its pages, and does what a person confirms.

Everything is the use case of the command of the same name: `list`, `logs`, `events`, `snapshot`,
`cancel`.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from orchestrator.app import cancel_job, remote
from orchestrator.app.commands import commands_for
from orchestrator.app.fleet.known_jobs import Scope, known_jobs
from orchestrator.app.fleet.summaries import Reader
from orchestrator.app.ranks.stacks import describe_stacks, rank_stacks
from orchestrator.app.remote import REFRESH_S, Found, fetch_logs
from orchestrator.app.snapshots import asker
from orchestrator.dashboard.fleet.row import in_order, is_old
from orchestrator.dashboard.follow.newest_lines import EventTail, LogTail, NewestLines
from orchestrator.dashboard.interactive.content import FleetContent, JobContent
from orchestrator.dashboard.scheduler_status import SchedulerPoll
from orchestrator.dashboard.screen.live import Screen, view_of
from orchestrator.dashboard.status import stale_reasons
from orchestrator.errors import BackendError, JobError
from orchestrator.seams import Clock


class JobServices:
    """Its methods are called on several threads, each of the functions that it returns on one."""

    def __init__(
        self, scope: Scope, environ: Mapping[str, str], clock: Clock, named: Found | None = None
    ) -> None:
        """
        Args:
            named: the job of the command line, which is the first page.
        """
        self.scope, self.environ, self.clock = scope, environ, clock
        self._reader: Reader | None = None
        self._found: dict[str, Found] = {}
        self._copies = threading.Lock()
        """Held while a copy of a run directory in a cluster is refreshed."""
        self._refreshed_at: dict[str, float] = {}
        if named is not None:
            self._found[str(named.run_dir.path)] = named

    def fleet(self) -> FleetContent:
        if self._reader is None:
            self._reader = Reader(self.environ, self.clock)
        jobs = known_jobs(self.scope, self.environ, self.clock, self._reader.crew)
        with self._copies:
            remote.refresh_all([job.found for job in jobs if job.found is not None])
        rows, unknown = self._reader.rows(jobs)
        self._found.update({str(job.path): job.found for job in jobs if job.found is not None})
        now = self.clock.now()
        shown = [row for row in rows if not row.gone and not is_old(row, now)]
        return FleetContent(
            rows=in_order(shown, now),
            warnings=stale_reasons(unknown),
            hidden=len(rows) - len(shown),
        )

    def open_job(self, job: str) -> Callable[[], JobContent]:
        found = self._of(job)
        poll = SchedulerPoll(asker(found, self.environ, self.clock), self.clock)
        screen = Screen(found.run_dir, poll, commands_for(found, self.environ))

        def read() -> JobContent:
            self._refresh(job, found)
            seen = screen.look(self.clock.now())
            if seen is None:
                raise JobError(
                    f"the submission of job {Path(job).name} has not finished",
                    fix="if it failed, submit it again",
                )
            return JobContent(view=view_of(seen), snapshot=seen.snapshot)

        return read

    def open_logs(self, job: str, host: str, rank: int | None) -> Callable[[], NewestLines]:
        found = self._of(job)
        tail = LogTail(found.run_dir, host, rank)
        with self._copies:
            fetch_logs(found, rank, None)

        def read() -> NewestLines:
            self._refresh(job, found, logs=True)
            return tail()

        return read

    def open_events(self, job: str) -> Callable[[], NewestLines]:
        found = self._of(job)
        tail = EventTail(found.run_dir)

        def read() -> NewestLines:
            self._refresh(job, found)
            return tail()

        return read

    def stacks(self, job: str) -> NewestLines:
        text = describe_stacks(rank_stacks(self._of(job), self.environ, self.clock))
        return NewestLines(lines=text.splitlines(), dropped=0)

    def cancel(self, job: str) -> str:
        found = self._of(job)
        return cancel_job.cancel(found.run_dir, self.environ, self.clock, found)

    def _of(self, job: str) -> Found:
        if (found := self._found.get(job)) is not None:
            return found
        raise JobError(
            f"the run directory {job} cannot be read from here",
            fix=f"`ndctl status {Path(job).name}` says why",
        )

    def _refresh(self, job: str, found: Found, *, logs: bool = False) -> None:
        """Refresh the copy of a run directory that is in a cluster."""
        if found.copy is None:
            return
        with self._copies, suppress(BackendError):
            now = self.clock.monotonic()
            if now - self._refreshed_at.get(job, -REFRESH_S) < REFRESH_S:
                return
            self._refreshed_at[job] = now
            if logs:
                found.copy.fetch_logs(follow=True)
            found.copy.refresh()

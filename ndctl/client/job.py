"""A handle on one job. It holds only where the job is; each call reads its files again."""

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from ndctl.client import html
from ndctl.client.errors import JobError, WaitTimeout, explained
from ndctl.client.values import Event, LogLine, Metric, Status
from orchestrator.app.remote import Found
from orchestrator.system import SystemClock

POLL_S = 0.2
LEAVE_S = 15.0
"""Seconds that the leader of an ended job has to exit."""


class Job:
    """A submitted job. The job does not depend on this object or this process.

    All methods may be called from any thread, and inside a running asyncio loop, which they block.
    They raise the errors of the command line: `ndctl.JobError` if the job is gone, and
    `ndctl.BackendError` if its scheduler or cluster must be asked and does not answer.
    """

    def __init__(self, run_dir: Path, notes: tuple[str, ...] = ()) -> None:
        """Use `ndctl.job(name)`, `ndctl.submit` or `ndctl.run`.

        Raises:
            TypeError: `run_dir` is a name.
        """
        if not isinstance(run_dir, Path):
            raise TypeError(
                f"ndctl.Job takes the Path of a run directory, not {run_dir!r};"
                f" ndctl.job({run_dir!r}) finds a job by its name"
            )
        self.run_dir = run_dir.absolute()
        """The run directory; for a job in Kubernetes, the copy of it on this machine."""
        self.notes = notes
        """What was found out at submission. Empty for a job that was looked up."""

    @property
    def name(self) -> str:
        return self.run_dir.name

    def __repr__(self) -> str:
        return f"<ndctl.Job {self.name} in {self.run_dir}>"

    def _repr_html_(self) -> str:
        try:
            return self.status()._repr_html_()
        except JobError as exc:
            return html.preformatted(f"{self.name}: {exc}")

    @explained
    def status(self) -> Status:
        """The state of the job now."""
        return _status_of(self._found())

    @explained
    def wait(self, timeout: float | None = None, *, check: bool = False) -> Status:
        """Wait until the job has ended, and return its last status.

        Args:
            timeout: seconds to wait at most. None: as long as it takes.
            check: raise an error unless the job succeeded.

        Raises:
            WaitTimeout: the job has not ended. It goes on, and can be waited for again.
            JobError: with `check`, the job failed or was cancelled.
        """
        from orchestrator.app.remote import kept_fresh
        from orchestrator.app.snapshots import asker
        from orchestrator.dashboard.follow.follow_loop import EndDetector

        clock, found = SystemClock(), self._found()
        deadline = _deadline(timeout, clock.monotonic())
        ended = EndDetector(found.run_dir, clock, asker(found, os.environ, clock))
        with kept_fresh(found):
            while not ended():
                left = deadline - clock.monotonic()
                if left <= 0:
                    raise WaitTimeout(
                        f"job {self.name} has not ended after {timeout:g} s; it goes on",
                        fix="wait again, or end it with Job.cancel()",
                    )
                clock.sleep(min(POLL_S, left))
        _await_leader(found, min(deadline, clock.monotonic() + LEAVE_S))
        status = _status_of(found)
        if check and status.state != "SUCCEEDED":
            raise JobError(f"job {status}", fix=status.fix)
        return status

    @explained
    def cancel(self, *, wait: bool = True) -> Status:
        """Cancel the job: its ranks write a checkpoint and exit.

        Args:
            wait: return when the job has ended, not at once.

        Raises:
            JobError: the job has already ended.
        """
        from orchestrator.app import cancel_job
        from orchestrator.app.remote import kept_fresh

        clock, found = SystemClock(), self._found()
        cancel_job.cancel(found.run_dir, os.environ, clock, found)
        if wait:
            with kept_fresh(found):
                cancel_job.wait_until_ended(found.run_dir, os.environ, clock, found)
            _await_leader(found, clock.monotonic() + LEAVE_S)
        return _status_of(found)

    @explained
    def events(self) -> list[Event]:
        """All events of the job and ndctl's decisions, in the order of the journal."""
        from ndctl.client.reading import event_of
        from orchestrator.journal.journal import read

        return [event_of(entry) for entry in read(self._found().run_dir.journal)]

    @explained
    def metrics(self) -> list[Metric]:
        """The optimizer steps in ascending order.

        Steps that a restart repeats are there once, as they were trained last. Of a program whose
        steps ndctl reads from its log (`run.metrics`), about one step per second is known.
        """
        from ndctl.client.reading import metrics_of

        return metrics_of(self._found())

    @explained
    def logs(
        self,
        rank: int | None = None,
        *,
        attempt: int | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[LogLine]:
        """The lines that the ranks printed, merged by their times.

        Args:
            rank: only the lines of this rank.
            attempt: of this attempt. None: of the newest; with `follow` also of later ones.
            tail: only so many last lines of each log.
            follow: yield lines as they are written, until the job ends.

        Raises:
            JobError: there is no log of that rank or attempt.
        """
        from ndctl.client.reading import during, log_lines_of, with_first
        from orchestrator.app.remote import kept_fresh

        for label, value in (("rank", rank), ("attempt", attempt), ("tail", tail)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{label} is {value!r}; give a whole number")
        if tail is not None and tail < 0:
            raise ValueError(f"tail is {tail}; give the number of lines, at least 0")
        found = self._found()
        lines = log_lines_of(found, rank, attempt, tail, follow)
        if not follow:
            return with_first(lines)
        return during(kept_fresh(found, logs=True) if found.copy else nullcontext(), lines)

    def _found(self) -> Found:
        """The job with a copy of its own, because several threads may use this object."""
        from ndctl.client.settings import warnings_of
        from orchestrator.app.remote import at, refresh
        from orchestrator.journal.journal import damaged_end

        found = at(self.run_dir, os.environ, SystemClock())
        refresh(found)
        lost = damaged_end(found.run_dir.journal)
        warnings_of([lost] if lost else [])
        return found


def _status_of(found: Found) -> Status:
    import msgspec

    from orchestrator.app.snapshots import snapshots_of
    from orchestrator.dashboard.status import status_json

    snapshot = snapshots_of([(found, True)], os.environ, SystemClock())[0]
    return msgspec.convert(status_json(snapshot), Status)


def _await_leader(found: Found, deadline: float) -> None:
    """Wait until the leader of an ended job has exited: only then can the job be submitted again,
    which may be the caller's next line."""
    from orchestrator.journal.journal import has_writer

    clock = SystemClock()
    while has_writer(found.run_dir.journal) and clock.monotonic() < deadline:
        clock.sleep(POLL_S)


def _deadline(timeout: float | None, now: float) -> float:
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is {timeout!r}; give seconds, at least 0, or None")
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout}; give seconds, at least 0, or None")
    return now + timeout

"""Asks the scheduler about a job when the journal cannot tell its state.

A job without a leader may be pending or requeued. A job with a leader that makes no progress may
have been suspended by the scheduler.
"""

from collections.abc import Callable

from msgspec.structs import replace

from orchestrator.job.stage import Submitted
from orchestrator.job.state import Run
from orchestrator.seams import Clock, LaunchStatus

POLL_INTERVAL_S = 10.0
QUIET_S = 15.0
"""A job is quiet after so long without a step and without a journal line."""

Ask = Callable[[Run], LaunchStatus | None]
"""Asks the scheduler about the job; returns None if the job has no scheduler."""


def is_quiet(heard_at: float, now: float) -> bool:
    """True if a job with a live leader may have been suspended by its scheduler."""
    return now - heard_at > QUIET_S


def needs_no_scheduler(run: Run, led: bool) -> bool:
    """Whether the journal says all about a job. On one machine only the processes of a job that had
    a leader and has none may say more."""
    if run.job is None:
        return True
    return run.job.backend == "local" and (led or isinstance(run.stage, Submitted))


class SchedulerPoll:
    """Asks every `POLL_INTERVAL_S`, only while the job has no leader or is quiet."""

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self.ask = ask
        self.clock = clock
        self.seen: LaunchStatus | None = None
        self.asked_at: float | None = None

    def __call__(self, run: Run, led: bool, heard_at: float | None = None) -> LaunchStatus | None:
        """The last answer of the scheduler; None if it need not be asked.

        Args:
            led: a leader process is alive.
            heard_at: time of the last step or journal line. None: do not check for quiet jobs.
        """
        quiet = heard_at is not None and is_quiet(heard_at, self.clock.now())
        if (led and not quiet) or run.ending is not None or needs_no_scheduler(run, led):
            self.asked_at = None
            return None
        now = self.clock.monotonic()
        if self.asked_at is None or now - self.asked_at >= POLL_INTERVAL_S:
            self.seen = self.ask(run)
            self.asked_at = now
        if led:  # the leader knows better, except that it cannot know that it is suspended
            seen = self.seen
            return replace(seen, at=seen.at or heard_at) if seen and seen.resume else None
        return self.seen

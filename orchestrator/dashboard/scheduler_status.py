"""A job without a leader may still be in a scheduler's hands: waiting, or queued again. One with a
leader that makes no step may have been stopped by it."""

from collections.abc import Callable
from dataclasses import replace

from orchestrator.job.state import Run
from orchestrator.seams import Clock, Sighting

ASK_AGAIN_S = 10.0
QUIET_S = 15.0
"""Without a sign of life: a step, or a line of the journal."""

Ask = Callable[[Run], Sighting | None]
"""What a scheduler says of the job; None where there is none to ask."""


def is_quiet(heard_at: float, now: float) -> bool:
    """Whether a job that has a leader may yet have been stopped by its scheduler."""
    return now - heard_at > QUIET_S


class Holding:
    """Asks now and then, and only while nobody leads the job or the job is quiet."""

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self.ask = ask
        self.clock = clock
        self.seen: Sighting | None = None
        self.asked_at: float | None = None

    def __call__(self, run: Run, led: bool, heard_at: float | None = None) -> Sighting | None:
        """`heard_at`: when the job gave its last sign of life; None where that is all the same."""
        quiet = heard_at is not None and is_quiet(heard_at, self.clock.now())
        if (
            (led and not quiet)
            or run.ending is not None
            or run.job is None
            or run.job.backend == "local"
        ):
            self.asked_at = None
            return None
        now = self.clock.monotonic()
        if self.asked_at is None or now - self.asked_at >= ASK_AGAIN_S:
            self.seen = self.ask(run)
            self.asked_at = now
        if led:  # whatever else a scheduler says, the leader knows better
            return replace(self.seen, at=heard_at) if self.seen and self.seen.resume else None
        return self.seen

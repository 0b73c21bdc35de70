"""A job without a leader may still be in a scheduler's hands: waiting, or queued again."""

from collections.abc import Callable

from orchestrator.seams import Clock, Sighting
from orchestrator.supervise.state import Run

ASK_AGAIN_S = 10.0

Ask = Callable[[Run], Sighting | None]
"""What a scheduler says of the job; None where there is none to ask."""


class Holding:
    """Asks now and then, and only while nobody leads the job."""

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self.ask = ask
        self.clock = clock
        self.seen: Sighting | None = None
        self.asked_at: float | None = None

    def __call__(self, run: Run, led: bool) -> Sighting | None:
        if led or run.ending is not None or run.job is None or run.job.backend == "local":
            self.asked_at = None
            return None
        now = self.clock.monotonic()
        if self.asked_at is None or now - self.asked_at >= ASK_AGAIN_S:
            self.seen = self.ask(run)
            self.asked_at = now
        return self.seen

"""At which steps a checkpoint is due: at regular ones, and again soon after a save that failed."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Schedule:
    every: int
    """Steps between two regular saves."""
    retry_at: int | None = None
    """The step after which a failed save is to be tried again."""
    delay: int = 1
    """Steps from the next failure to the retry after it."""

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.retry_at

    def begun(self, step: int) -> "Schedule":
        """A save of `step` was begun; a regular one makes whatever was to be retried obsolete."""
        delay = 1 if step % self.every == 0 else self.delay
        return replace(self, retry_at=None, delay=delay)

    def failed(self, step: int) -> "Schedule":
        """After `step` it was known that the last save had failed; each retry waits twice as
        long as the one before."""
        return replace(self, retry_at=step + self.delay, delay=2 * self.delay)

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
    since: int | None = None
    """The step of the last regular save, where `every` may change; None: they are at multiples."""

    def due(self, step: int) -> bool:
        return self._regular(step) or step == self.retry_at

    def begun(self, step: int) -> "Schedule":
        """A save of `step` was begun; a regular one makes whatever was to be retried obsolete."""
        if not self._regular(step):
            return replace(self, retry_at=None)
        since = None if self.since is None else step
        return replace(self, retry_at=None, delay=1, since=since)

    def failed(self, step: int) -> "Schedule":
        """After `step` it was known that the last save had failed; each retry waits twice as
        long as the one before."""
        return replace(self, retry_at=step + self.delay, delay=2 * self.delay)

    def next_due(self, step: int) -> int:
        """The first step after `step` at which a save is due."""
        if self.since is None:
            regular = step - step % self.every + self.every
        else:
            regular = max(step + 1, self.since + self.every)
        return regular if self.retry_at is None else min(regular, self.retry_at)

    def _regular(self, step: int) -> bool:
        if self.since is None:
            return step % self.every == 0
        return step - self.since >= self.every

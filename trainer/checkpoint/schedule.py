"""The steps at which a checkpoint is due: at a regular interval, soon after a failed save, and when
one is asked for."""

from dataclasses import dataclass, replace
from typing import NamedTuple

JUST_BEGUN = 3
"""Steps after the begin of a save in which no other one is begun because it is asked for."""


class Resumed(NamedTuple):
    """Where an attempt resumed."""

    done: int
    """Steps that earlier attempts have done."""
    saved: int
    """Step of the newest complete checkpoint on the disk."""


AT_START = Resumed(0, 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    every: int
    """Steps between two regular saves."""
    retry_at: int | None = None
    """The step after which a failed save is retried."""
    delay: int = 1
    """Steps between the next failure and its retry."""
    since: int | None = None
    """Step of the last regular save, if `every` can change. None: saves are at multiples of it."""
    begun_at: int | None = None
    """Step of the last save."""
    last: int | None = None
    """Last step of the job, which is always saved."""

    def after(self, resumed: Resumed) -> "Schedule":
        """The schedule of an attempt. Ranks that resume from memory do not come to a step again
        whose save was cut off, so its save is made up for."""
        missed = resumed.done // self.every > resumed.saved // self.every
        return replace(self, retry_at=resumed.done + 1) if missed else self

    def due(self, step: int) -> bool:
        return self._regular(step) or step == self.retry_at

    def asked(self, step: int) -> "Schedule":
        """The schedule after a save was asked for, for `step` at the earliest."""
        if self.begun_at is not None and step - self.begun_at <= JUST_BEGUN:
            return self
        return replace(self, retry_at=step)

    def begun(self, step: int) -> "Schedule":
        """The schedule after the save of `step` started."""
        if not self._regular(step):
            # This is a retry. Keep the delay, so that it still doubles if the retry fails too.
            return replace(self, retry_at=None, begun_at=step)
        since = None if self.since is None else step
        return replace(self, retry_at=None, delay=1, since=since, begun_at=step)

    def is_urgent(self, step: int) -> bool:
        """The save after `step` was asked for, or an earlier one has failed."""
        return step == self.retry_at

    def is_half_over(self, step: int) -> bool:
        """Half of the steps from the last save to the next one are done."""
        return self.begun_at is not None and 2 * (step - self.begun_at) >= self.every

    def failed(self, step: int) -> "Schedule":
        """The schedule after a failure was noticed at `step`. The delay doubles at each retry."""
        return replace(self, retry_at=step + self.delay, delay=2 * self.delay)

    def next_due(self, step: int) -> int:
        """The first step after `step` at which a save is due."""
        if self.since is None:
            regular = step - step % self.every + self.every
        else:
            regular = max(step + 1, self.since + self.every)
        return min(one for one in (regular, self.retry_at, self.last) if one is not None)

    def _regular(self, step: int) -> bool:
        if self.since is None:
            return step % self.every == 0
        return step - self.since >= self.every

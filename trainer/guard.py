"""Updates that are left out because they would spoil the model, and training that goes astray.

All of it follows from the totals of the steps, which are the same on every rank: no rank needs to
ask another one. Its state is part of a checkpoint: a job that is restarted in the middle of bad
steps must fail where it would have failed, or it would be restarted for ever.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.contract.spec.train_spec import SpikeSpec

DEVIATION = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
FLOOR = 0.01
"""Of the median: a smaller deviation is counted as this, for losses of few digits hardly differ."""


class Unstable(Exception):
    """Training went astray; a restart would come to the same steps again."""

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since
        """The first of the bad steps."""


class NotFinite(Unstable):
    """Loss or gradient were not finite for too many steps in a row."""


class LossSpike(Unstable):
    """The loss was far above what it had been, for too many steps in a row."""


@dataclass(slots=True)
class Skips:
    total: int = 0
    """Updates left out so far, for whatever reason."""
    bad_in_a_row: int = 0
    """Steps up to now whose loss or gradient was not finite."""
    since: int = 0
    """The first of these steps."""

    def restore(self, saved: "Skips") -> None:
        self.total, self.bad_in_a_row = saved.total, saved.bad_in_a_row
        self.since = saved.since

    def learned(self) -> None:
        self.bad_in_a_row = 0

    def empty(self) -> None:
        """No token was to be learned: that says nothing about the model's health."""
        self.total += 1

    def bad(self, step: int) -> None:
        self.total += 1
        self.since = self.since if self.bad_in_a_row else step
        self.bad_in_a_row += 1


@dataclass(slots=True)
class Spikes:
    """The losses that were in order, and how long they have not been.

    A loss is too high when it lies more than `deviations` robust standard deviations above the
    median of the last `window` losses that were not too high themselves.
    """

    losses: tuple[float, ...] = ()
    high_in_a_row: int = 0
    since: int = 0
    """The first step of these."""

    def restore(self, saved: "Spikes") -> None:
        self.losses, self.high_in_a_row = saved.losses, saved.high_in_a_row
        self.since = saved.since

    def limit(self, spec: SpikeSpec) -> float | None:
        """The highest loss that is in order; None before there are `window` to compare with."""
        if len(self.losses) < spec.window:
            return None
        middle = median(self.losses)
        spread = DEVIATION * median(abs(loss - middle) for loss in self.losses)
        return middle + spec.deviations * max(spread, FLOOR * abs(middle))

    def seen(self, step: int, loss: float, spec: SpikeSpec) -> None:
        """After `step`; one whose loss is not finite is no spike, and is counted elsewhere."""
        if not math.isfinite(loss):
            return
        limit = self.limit(spec)
        if limit is not None and loss > limit:
            self.since = self.since if self.high_in_a_row else step
            self.high_in_a_row += 1
            return
        self.high_in_a_row = 0
        self.losses = (*self.losses, loss)[-spec.window :]


def too_many(step: int, since: int, limit: int, what: str, names: Sequence[str]) -> NotFinite:
    """The error to end with at `step`, the last of `limit` bad ones. `what` says which total was
    not finite; `names` are parameters of this rank whose gradients were not."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    where = f" (on this rank the gradients of {', '.join(names[:3])}{more})" if names else ""
    return NotFinite(
        f"step {step}: {what} not finite{where}, and so it was for {limit} steps in a row. Their"
        " updates were skipped: weights and optimizer are as they were before these steps."
        " Lower train.optimizer.lr or lengthen the warm-up, set train.grad_clip, or look at the"
        f" data that these steps read; train.max_bad_steps is {limit}",
        since,
    )


def too_high(step: int, since: int, loss: float, limit: float, spec: SpikeSpec) -> LossSpike:
    return LossSpike(
        f"step {step}: the loss is {loss:.4f}, and for {spec.steps} steps in a row it was above"
        f" {limit:.4f}, which is {spec.deviations:g} robust standard deviations above the median of"
        f" the {spec.window} losses before. Unlike those of bad steps, their updates were made: go"
        " back to a checkpoint from before them. Lower train.optimizer.lr, or look at the data that"
        " these steps read; train.spike says what counts as one",
        since,
    )

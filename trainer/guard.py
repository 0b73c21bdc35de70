"""Counts bad steps and ends a training that is unstable.

All decisions use the totals of a step, which are the same on every rank, so no communication is
needed. The counters are part of a checkpoint: a job that is restarted between bad steps must fail
at the same step, or it would restart forever.
"""

import math
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from orchestrator.contract.spec.train_spec import SpikeSpec

DEVIATION = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
FLOOR = 0.01
"""Lower bound of the deviation as a share of the median: rounded losses hardly differ."""


class Unstable(Exception):
    """The training is unstable; a restart would repeat the same steps."""

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since
        """The first bad step."""


class NotFinite(Unstable):
    """The loss or the gradient was not finite for too many steps in a row."""


class LossSpike(Unstable):
    """The loss was far above its recent median for too many steps in a row."""


class Skips(Struct):
    total: int = 0
    """Updates skipped so far, for any reason."""
    bad_in_a_row: int = 0
    """Number of last steps in a row whose loss or gradient was not finite."""
    since: int = 0
    """The first step of that row."""

    def restore(self, saved: "Skips") -> None:
        self.total, self.bad_in_a_row = saved.total, saved.bad_in_a_row
        self.since = saved.since

    def learned(self) -> None:
        self.bad_in_a_row = 0

    def empty(self) -> None:
        """The batch had no token to learn. The update is skipped, but the step is not bad."""
        self.total += 1

    def bad(self, step: int) -> None:
        self.total += 1
        self.since = self.since if self.bad_in_a_row else step
        self.bad_in_a_row += 1


class Spikes(Struct):
    """Detects loss spikes.

    A loss is too high if it is more than `deviations` robust standard deviations (1.4826 times the
    median absolute deviation) above the median of the last `window` normal losses.
    """

    losses: tuple[float, ...] = ()
    high_in_a_row: int = 0
    since: int = 0
    """The first step of that row."""

    def restore(self, saved: "Spikes") -> None:
        self.losses, self.high_in_a_row = saved.losses, saved.high_in_a_row
        self.since = saved.since

    def limit(self, spec: SpikeSpec) -> float | None:
        """The highest normal loss; None until there are `window` losses to compare with."""
        if len(self.losses) < spec.window:
            return None
        middle = median(self.losses)
        spread = DEVIATION * median(abs(loss - middle) for loss in self.losses)
        return middle + spec.deviations * max(spread, FLOOR * abs(middle))

    def seen(self, step: int, loss: float, spec: SpikeSpec) -> None:
        """Record the loss of `step`."""
        if not math.isfinite(loss):
            return  # not a spike: `Skips` counts it
        limit = self.limit(spec)
        if limit is not None and loss > limit:
            self.since = self.since if self.high_in_a_row else step
            self.high_in_a_row += 1
            return
        self.high_in_a_row = 0
        self.losses = (*self.losses, loss)[-spec.window :]


def not_finite_error(
    step: int, since: int, limit: int, what: str, names: Sequence[str]
) -> NotFinite:
    """The error that ends the job at `step`, the last of `limit` bad steps.

    Args:
        what: which total was not finite.
        names: parameters of this rank whose gradients were not finite.
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    where = f" (on this rank the gradients of {', '.join(names[:3])}{more})" if names else ""
    return NotFinite(
        f"step {step}: {what} not finite{where}, for {limit} steps in a row. Their updates were"
        " skipped: weights and optimizer state are unchanged since before these steps. Lower"
        " train.optimizer.lr, lengthen the warm-up, set train.grad_clip, or check the data of these"
        f" steps; train.max_bad_steps is {limit}",
        since,
    )


def loss_spike_error(
    step: int, since: int, loss: float, limit: float, spec: SpikeSpec
) -> LossSpike:
    return LossSpike(
        f"step {step}: the loss is {loss:.4f}, and for {spec.steps} steps in a row it was above"
        f" {limit:.4f}, which is {spec.deviations:g} robust standard deviations above the median of"
        f" the {spec.window} losses before. Their updates were applied, so resume from a checkpoint"
        " before them. Lower train.optimizer.lr, or check the data of these steps; train.spike sets"
        " the limits",
        since,
    )

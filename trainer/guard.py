"""Updates that are left out because they would spoil the model, and when there are too many."""

from collections.abc import Sequence
from dataclasses import dataclass


class NotFinite(Exception):
    """Loss or gradient were not finite for too many steps in a row."""


@dataclass(slots=True)
class Skips:
    """The same on every rank, and part of a checkpoint: a job that is restarted in the middle of
    bad steps must fail where it would have failed, or it would be restarted for ever."""

    total: int = 0
    """Updates left out so far, for whatever reason."""
    bad_in_a_row: int = 0
    """Steps up to now whose loss or gradient was not finite."""

    def restore(self, saved: "Skips") -> None:
        self.total, self.bad_in_a_row = saved.total, saved.bad_in_a_row

    def learned(self) -> None:
        self.bad_in_a_row = 0

    def empty(self) -> None:
        """No token was to be learned: that says nothing about the model's health."""
        self.total += 1

    def bad(self) -> None:
        self.total += 1
        self.bad_in_a_row += 1


def too_many(step: int, limit: int, what: str, names: Sequence[str]) -> NotFinite:
    """The error to end with at `step`; `what` says which total was not finite, and `names` are the
    parameters whose gradients were not, as far as this rank holds them."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    where = f" (on this rank the gradients of {', '.join(names[:3])}{more})" if names else ""
    return NotFinite(
        f"step {step}: {what} not finite{where}, and so it was for {limit} steps in a row. Their"
        " updates were skipped: weights and optimizer are as they were before these steps."
        " Lower train.optimizer.lr or lengthen the warm-up, set train.grad_clip, or look at the"
        f" data that these steps read; train.max_bad_steps is {limit}"
    )

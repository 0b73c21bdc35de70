"""Steps of a framework's trainer, reported as those of the job."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ndctl.rank.link import current


class Steps:
    """The steps of one trainer."""

    def __init__(self) -> None:
        self.earlier = 0
        """Steps that this process did before this training, for example with another trainer."""

    def begin(self, step: int, skipped: Sequence[tuple[str, str]] = ()) -> None:
        """The training begins after `step`. `skipped`: newer checkpoints that cannot be used, each
        with its reason."""
        link = current()
        self.earlier = max(0, link.step - step)
        if not link.logged:
            link.step = step
            if link.rank == 0:
                passed = [{"name": name, "why": why} for name, why in skipped]
                message = {"kind": "TrainingResumed", "attempt": link.attempt, "step": step}
                link.send({**message, "passed_over": passed})
        # From now on optimizer steps are not counted.
        link.logged = True

    def done(self, step: int) -> int:
        """Report that the trainer has done `step`. Returns the step of the job."""
        link = current()
        link.step = self.earlier + step
        link.beat("train")
        return link.step


@contextmanager
def checkpoint_phase() -> Iterator[None]:
    """The rank saves a checkpoint, which has its own time limit."""
    link = current()
    before = link.phase
    link.beat("checkpoint")
    try:
        yield
    finally:
        link.beat(before)

"""Garbage collection at the same step on all ranks."""

import gc
import weakref

from trainer.rank.host.garbage import EVERY_STEPS, collect_at, collected_by_step


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_garbage_is_collected_at_its_step_only() -> None:
    with collected_by_step():
        assert not gc.isenabled()
        gone = weakref.ref(Cycle())
        many = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
        for step in range(1, EVERY_STEPS):
            collect_at(step)
        assert gone() is not None
        collect_at(EVERY_STEPS)
        assert gone() is None
        del many
    assert gc.isenabled()

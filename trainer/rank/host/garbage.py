"""Runs Python's garbage collection on all ranks at the same step.

By default Python starts it after some number of allocations, which comes at different steps on
different ranks. Each step then waits for the rank that collects, so with many ranks almost every
step does.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 50
"""As in torchtitan. A collection takes milliseconds, because it sees only what was created since
the training began; so a share of a thousandth of most steps is not worth a setting."""


@contextmanager
def collected_by_step(*, kept: bool = False) -> Iterator[None]:
    """No automatic collection inside; the loop calls `collect_at`.

    Args:
        kept: the process may outlive the model, so the model must stay collectable.
    """
    gc.collect()
    if not kept:
        gc.freeze()  # later collections do not look at the modules and the model
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_at(step: int) -> None:
    if step % EVERY_STEPS == 0:
        gc.collect()

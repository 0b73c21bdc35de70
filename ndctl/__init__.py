"""The public Python package of ndctl.

A training script calls these, on every rank. Without ndctl (`python train.py`, `torchrun train.py`)
they do nothing special, so the lines can stay.

    ndctl.attempt                which start of the ranks this is, from 1
    ndctl.log(step, loss=…)      progress and metrics
    ndctl.phase("eval")          not a training step
    ndctl.latest_checkpoint()    where to resume
    ndctl.checkpoint(step)       save a checkpoint, all ranks together
    ndctl.should_stop()          checkpoint now and leave

Names are imported when they are used. `import ndctl` takes about a millisecond.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndctl.rank.reporting import log, phase
    from ndctl.rank.resuming import latest_checkpoint
    from ndctl.rank.saving import CheckpointError, checkpoint
    from ndctl.rank.stopping import should_stop

    attempt: int

_HOMES = {
    "CheckpointError": "ndctl.rank.saving",
    "checkpoint": "ndctl.rank.saving",
    "latest_checkpoint": "ndctl.rank.resuming",
    "log": "ndctl.rank.reporting",
    "phase": "ndctl.rank.reporting",
    "should_stop": "ndctl.rank.stopping",
}
"""Name -> module that defines it."""

__all__ = [
    "CheckpointError",
    "attempt",
    "checkpoint",
    "latest_checkpoint",
    "log",
    "phase",
    "should_stop",
]


def __getattr__(name: str) -> Any:
    if name == "attempt":
        from ndctl.rank.link import current

        return current().attempt
    if name not in _HOMES:
        raise AttributeError(f"module 'ndctl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Phases of a rank, as the rank reports them."""

from typing import Literal

Phase = Literal[
    "init", "compile", "train", "data", "checkpoint", "eval", "write", "profile", "exit"
]
"""Reported before the phase begins, because each phase has its own time limit: only in the phase
`train` is a standstill of a few step times a hang.

`data`: workers of a data loader start or end; `write`: files besides checkpoints, such as metrics;
`profile`: steps under the profiler; `exit`: the last step is done and the process is ending."""

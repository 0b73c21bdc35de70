"""What a rank is doing, as it says itself."""

from typing import Literal

Phase = Literal["init", "compile", "train", "checkpoint", "eval", "write", "profile", "exit"]
"""Told before it begins, for each has a clock of its own: only within a `train`ing step is a
standstill of a few steps a hang.

`write`: files beside checkpoints, as metrics; `profile`: steps under the profiler; `exit`: the last
step is done, and the process is on its way out."""

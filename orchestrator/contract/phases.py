"""What a rank is doing, as it says itself."""

from typing import Literal

Phase = Literal["init", "compile", "train", "checkpoint", "eval", "exit"]
"""`exit`: the last step is done, and the process is on its way out."""

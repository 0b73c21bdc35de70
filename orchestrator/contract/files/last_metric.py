"""How far an attempt came that nobody saw the end of: its last line in `metrics.jsonl`."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.read_json import read_json

END_BYTES = 64 * 1024
"""Of the file that are looked at: hundreds of lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    attempt: int
    step: int
    at: float
    """Unix seconds, when the step was done."""


def last_reached(metrics: Path) -> Reached | None:
    """The newest step that was done, whoever did it; None where the file does not say. A line that
    a crash cut short is passed over, and so is one that cannot be read."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            body = read_json(line)
            return Reached(
                attempt=int(body["attempt"]), step=int(body["step"]), at=float(body["time"])
            )
    return None

"""`metrics.jsonl`: a line per optimizer step, in one write each: readers see whole lines."""

import json
import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

LOG = logging.getLogger("trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    attempt: int
    step: int
    """From 1; a step that is done again after a resume is a new line."""
    loss: float
    """Mean over all tokens of the global batch."""
    grad_norm: float
    """Before clipping, over the whole model."""
    lr: float
    tokens_per_second: float
    """Of the whole job."""
    step_s: float
    time: float
    """Unix time at the end of the step."""


class MetricsFile:
    """Appends; what a crash cut off at the end is closed with a newline first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, metrics: StepMetrics) -> None:
        """Write a line; a full disk costs lines, never the training."""
        try:
            os.write(self._fd, to_line(metrics))
        except OSError as exc:
            LOG.warning("the metrics of step %d could not be written: %s", metrics.step, exc)

    def close(self) -> None:
        os.close(self._fd)


def to_line(metrics: StepMetrics) -> bytes:
    """One JSON line; a loss that is not finite is null there, for JSON has no NaN."""
    values = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(metrics).items()
    }
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"

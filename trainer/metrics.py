"""`metrics.jsonl`: a line per optimizer step, in one write each: readers see whole lines."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.lines import LineFile


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
    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def append(self, metrics: StepMetrics) -> None:
        self._lines.append(to_line(metrics))

    def close(self) -> None:
        self._lines.close()


def to_line(metrics: StepMetrics) -> bytes:
    """One JSON line; a loss that is not finite is null there, for JSON has no NaN."""
    values = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(metrics).items()
    }
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"

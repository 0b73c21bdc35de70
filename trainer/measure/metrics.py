"""What is measured of each step, and `metrics.jsonl`: a line per optimizer step, in one write each,
so that readers see whole lines.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.measure.lines import LineFile
from trainer.rank.fence import Admit, admit_all


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The same on every rank, but for rank 0's own seconds and memory."""

    attempt: int
    step: int
    """From 1; a step that is done again after a resume is a new line."""
    loss: float
    """Cross-entropy, mean over the learned tokens of the global batch; NaN when there was none."""
    z_loss: float | None = None
    """What z-loss adds to it; None without z-loss."""
    grad_norm: float
    """Before clipping, over the whole model."""
    lr: float
    tokens_per_second: float
    """Of the whole job, learned or not."""
    mfu: float | None = None
    """Part of the devices' peak that the model's own work comes to; None where that is unknown."""
    step_s: float
    data_s: float = 0.0
    """Waiting for the micro batches."""
    passes_s: float = 0.0
    """Forward and backward together."""
    forward_s: float | None = None
    """None where a pipeline mixes the two."""
    backward_s: float | None = None
    optimizer_s: float = 0.0
    """On a GPU, of the update before this one: its own is still running."""
    checkpoint_s: float = 0.0
    """That saving has held training up since the line before."""
    peak_memory_bytes: int = 0
    """Of rank 0 up to now: of the GPU's allocator, or of the process on a CPU."""
    skipped: int = 0
    """Updates left out so far in the job: nothing to learn, or loss or gradient not finite."""
    eval_loss: float | None = None
    """On held-out data after this step, where it was evaluated."""
    eval_s: float | None = None
    time: float
    """Unix time at the end of the step."""

    def to_dict(self) -> dict[str, Any]:
        """With None for what is not finite, for JSON has no NaN."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


class MetricsFile:
    def __init__(self, path: Path, admit: Admit = admit_all) -> None:
        self._lines = LineFile(path, admit)

    def append(self, metrics: StepMetrics) -> None:
        self._lines.append(to_line(metrics))

    def close(self) -> None:
        self._lines.close()


def to_line(metrics: StepMetrics) -> bytes:
    """One JSON line."""
    return json.dumps(metrics.to_dict(), separators=(",", ":")).encode() + b"\n"

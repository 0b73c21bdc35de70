"""The measurements of a step, and `metrics.jsonl` with one line per optimizer step."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ndctl.rank.fence import Admit, admit_all
from ndctl.rank.line_file import LineFile


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Totals of the job. Seconds and memory are those of rank 0."""

    attempt: int
    step: int
    """From 1. A step that is repeated after a resume gets a new line."""
    loss: float
    """Cross-entropy, mean over the learned tokens of the global batch; NaN if there were none."""
    z_loss: float | None = None
    """What z-loss adds to the loss; None without z-loss."""
    grad_norm: float
    """Before clipping, over the whole model."""
    lr: float
    tokens_per_second: float
    """Of the whole job; tokens that are not learned count too."""
    mfu: float | None = None
    """Model FLOPS utilisation: model FLOPS divided by peak FLOPS; None if the peak is unknown."""
    step_s: float
    data_s: float = 0.0
    """Waiting for the micro batches."""
    passes_s: float = 0.0
    """Forward and backward together."""
    forward_s: float | None = None
    """None with a pipeline, which interleaves forward and backward."""
    backward_s: float | None = None
    optimizer_s: float = 0.0
    """On a GPU, the time of the previous update, because this one is still running."""
    checkpoint_s: float = 0.0
    """Time that saves paused training since the previous line."""
    peak_memory_bytes: int = 0
    """Of rank 0 so far: of the GPU's allocator, or of the process on a CPU."""
    fullest_memory_bytes: int | None = None
    """The same, of the rank that has the most, when the ranks last compared (`fullest.py`); None:
    not yet in this attempt."""
    fullest_rank: int | None = None
    gpu_utilization: float | None = None
    """0 to 1, of rank 0's GPU; as the next two None if NVIDIA's driver cannot tell."""
    gpu_temperature_c: float | None = None
    gpu_power_w: float | None = None
    skipped: int = 0
    """Updates skipped so far: no token to learn, or a loss or gradient that is not finite."""
    eval_loss: float | None = None
    """On held-out data; None unless this step was evaluated."""
    eval_s: float | None = None
    time: float
    """Unix time at the end of the step."""

    def to_dict(self) -> dict[str, Any]:
        """NaN and infinity become None, because JSON does not have them."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


class MetricsFile:
    def __init__(self, path: Path, admit: Admit = admit_all) -> None:
        self._lines = LineFile(path, admit)

    def append(self, *metrics: StepMetrics) -> None:
        self._lines.append(*map(to_line, metrics))

    def close(self) -> None:
        self._lines.close()


def to_line(metrics: StepMetrics) -> bytes:
    """One JSON line, with its newline."""
    return json.dumps(metrics.to_dict(), separators=(",", ":")).encode() + b"\n"

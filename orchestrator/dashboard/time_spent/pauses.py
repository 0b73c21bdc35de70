"""Saves that paused training, from `metrics.jsonl`.

The file may have a million lines, and few name a pause. The others are not decoded.
"""

from pathlib import Path

from msgspec import Struct

from orchestrator.dashboard.metrics import Metric, MetricTail, parse_metric

_KEY = b'"checkpoint_s":'
_NONE = b'"checkpoint_s":0.0'


class Pause(Struct, frozen=True, kw_only=True):
    attempt: int
    step: int
    """The last step before the save."""
    seconds: float


def pause_of(metric: Metric) -> Pause | None:
    if not metric.checkpoint_s:
        return None
    return Pause(attempt=metric.attempt, step=metric.step, seconds=metric.checkpoint_s)


class PauseTail:
    """Reads the pauses of the lines that were appended since the last call of `more`."""

    def __init__(self, path: Path) -> None:
        self._tail = MetricTail(path)

    def more(self) -> tuple[Pause, ...]:
        # Most lines have no pause, and parsing them takes longest.
        metrics = (parse_metric(line) for line in self._tail.lines() if _may_pause(line))
        pauses = (pause_of(metric) for metric in metrics if metric is not None)
        return tuple(pause for pause in pauses if pause is not None)


def _may_pause(line: bytes) -> bool:
    at = line.find(_KEY)
    return at >= 0 and line[at : at + len(_NONE) + 1] not in (_NONE + b",", _NONE + b"}")

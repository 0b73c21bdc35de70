"""Saves that paused training, from `metrics.jsonl`.

The file may have a million lines, and few name a pause. The others are not decoded.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from orchestrator.dashboard.metrics import Metric, parse_metric

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
        self.path = path
        self.offset = 0

    def more(self) -> tuple[Pause, ...]:
        return tuple(self._each())

    def _each(self) -> Iterator[Pause]:
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                self.offset += len(line)
                metric = parse_metric(line) if _may_pause(line) else None
                if metric is not None and (pause := pause_of(metric)) is not None:
                    yield pause


def _may_pause(line: bytes) -> bool:
    at = line.find(_KEY)
    return at >= 0 and line[at : at + len(_NONE) + 1] not in (_NONE + b",", _NONE + b"}")

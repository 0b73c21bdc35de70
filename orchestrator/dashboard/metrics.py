"""Reads the trainer's `metrics.jsonl` (one line per optimizer step) in bounded memory.

A step that is repeated after a resume has a second line, which replaces the first. An incomplete
last line and lines that cannot be parsed are ignored: metrics are only displayed, and no decision
depends on them.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ndctl.rank.regular_file import open_regular
from orchestrator.contract.read_json import read_json
from orchestrator.contract.times import check_time

MAX_POINTS = 512
"""Points that a series keeps at most."""
RECENT_STEPS = 32
"""The step time is the mean over so many steps of the current attempt."""
_CHUNK = 64 * 1024


class Metric(Struct, frozen=True, kw_only=True):
    attempt: int
    step: int
    loss: float | None = None
    """None if it was not a finite number."""
    grad_norm: float | None = None
    lr: float | None = None
    tokens_per_second: float | None = None
    step_s: float | None = None
    peak_memory_bytes: float | None = None
    """Of rank 0."""
    gpu_utilization: float | None = None
    """0 to 1, of rank 0."""
    gpu_temperature_c: float | None = None
    """Of rank 0, as the next."""
    gpu_power_w: float | None = None
    mfu: float | None = None
    checkpoint_s: float | None = None
    """Seconds for which saves paused training since the line before."""
    data_s: float | None = None
    fullest_memory_bytes: float | None = None
    """Peak memory of the rank that has the most, when the ranks last compared."""
    fullest_rank: float | None = None
    time: float | None = None
    """Unix seconds at the end of the step."""


class Progress(Struct, frozen=True, kw_only=True):
    """A summary of the metrics. Its size does not grow with the number of steps."""

    first: Metric | None = None
    last: Metric | None = None
    samples: tuple[Metric, ...] = ()
    """In ascending steps: the last line of each `stride` steps, and always the newest. A line of a
    repeated step replaces the lines from there on."""
    stride: int = 1
    recent: tuple[tuple[int, float], ...] = ()
    """(step, Unix time) of the last steps of the current attempt."""

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) in ascending steps."""
        return tuple((one.step, one.loss) for one in self.samples if one.loss is not None)

    @property
    def step_s(self) -> float | None:
        """Seconds per step at present, including time for checkpoints."""
        if len(self.recent) < 2:
            return None if self.last is None else self.last.step_s
        (step, began), (last_step, ended) = self.recent[0], self.recent[-1]
        return (ended - began) / (last_step - step) if last_step > step else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second at present, over the same steps as `step_s`: a single step may be much
        faster or slower than the others. All steps have as many tokens as the last one."""
        last, step_s = self.last, self.step_s
        if last is None or last.tokens_per_second is None or last.step_s is None or not step_s:
            return None if last is None else last.tokens_per_second
        return last.tokens_per_second * last.step_s / step_s

    @property
    def longest_pause_s(self) -> float | None:
        """The longest time between two lines at present: a program may not report each step, and a
        save or an evaluation comes between two steps."""
        times = [at for _, at in self.recent]
        pauses = [after - before for before, after in itertools.pairwise(times)]
        return max(pauses) if pauses else self.step_s


NO_PROGRESS = Progress()


def parse_metric(line: bytes) -> Metric | None:
    """None if the line cannot be parsed."""
    try:
        body = read_json(line)
        return Metric(
            attempt=int(body["attempt"]),
            step=int(body["step"]),
            time=_time(body.get("time")),
            **{name: _number(body.get(name)) for name in _OPTIONAL},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


_OPTIONAL = (
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "step_s",
    "peak_memory_bytes",
    "gpu_utilization",
    "gpu_temperature_c",
    "gpu_power_w",
    "mfu",
    "checkpoint_s",
    "data_s",
    "fullest_memory_bytes",
    "fullest_rank",
)


def _time(value: Any) -> float | None:
    at = _number(value)
    if at is not None:
        check_time(at)
    return at


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def read_ends(path: Path) -> Progress:
    """Reads only the first line and the last lines: all of `Progress` except the series."""
    recent = list(itertools.islice(_metrics_backwards(path), RECENT_STEPS))
    progress = fold_metrics(NO_PROGRESS, reversed(recent))
    try:
        with open_regular(path) as file:
            first = parse_metric(file.readline())
    except FileNotFoundError:
        first = None
    return replace(progress, first=first or progress.first)


def _metrics_backwards(path: Path) -> Iterator[Metric]:
    for line in lines_backwards(path):
        metric = parse_metric(line)
        if metric is not None:
            yield metric


def lines_backwards(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, last line first; an incomplete last line is ignored."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        place = file.seek(0, os.SEEK_END)
        rest: bytes | None = None
        while place > 0:
            start = max(0, place - _CHUNK)
            file.seek(start)
            pieces = file.read(place - start).split(b"\n")
            if rest is not None:
                pieces[-1] += rest
                rest = None
            elif len(pieces) > 1:
                pieces.pop()  # text after the last newline: empty, or an incomplete line
            else:
                place = start
                continue
            yield from reversed(pieces[1:])
            rest, place = pieces[0], start
        if rest is not None:
            yield rest


class MetricTail:
    """Reads the lines that were appended since the last call of `more`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def more(self) -> tuple[Metric, ...]:
        return tuple(self.each())

    def each(self) -> Iterator[Metric]:
        for line in self.lines():
            if (metric := parse_metric(line)) is not None:
                yield metric

    def lines(self) -> Iterator[bytes]:
        """One line at a time, because a file of weeks has a million."""
        with contextlib.suppress(FileNotFoundError), open_regular(self.path) as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                self.offset += len(line)
                yield line


def fold_metrics(progress: Progress, metrics: Iterable[Metric]) -> Progress:
    """`progress` after `metrics`. Pass many at once, because each call copies the series."""
    series = _Series(list(progress.samples), progress.stride)
    recent = list(progress.recent)
    first, last = progress.first, progress.last
    for metric in metrics:
        if last is None or metric.attempt != last.attempt:
            recent.clear()  # the pause between two attempts is not step time
        if metric.time is not None:
            recent.append((metric.step, metric.time))
            del recent[:-RECENT_STEPS]
        if first is None or metric.step <= first.step:
            first = metric
        last = metric
        series.add(metric)
    return replace(
        progress,
        first=first,
        last=last,
        samples=tuple(series.samples),
        stride=series.stride,
        recent=tuple(recent),
    )


@dataclass(slots=True)
class _Series:
    samples: list[Metric] = field(default_factory=list)
    stride: int = 1

    def add(self, metric: Metric) -> None:
        while self.samples and self.samples[-1].step >= metric.step:
            self.samples.pop()  # the step is repeated after a resume
        self._put(metric)
        # Too many samples: halve the resolution, so that memory stays bounded.
        if len(self.samples) > MAX_POINTS:
            self.stride *= 2
            old, self.samples = self.samples, []
            for sample in old:
                self._put(sample)

    def _put(self, metric: Metric) -> None:
        """Keeps the last line of each interval of `stride` steps."""
        if self.samples and self.samples[-1].step // self.stride == metric.step // self.stride:
            self.samples[-1] = metric
        else:
            self.samples.append(metric)

"""Reads the journal, the metrics and the logs of a job as public values."""

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ndctl.client.settings import warnings_of
from ndctl.client.values import Event, LogLine, Metric
from ndctl.rank.regular_file import open_regular
from orchestrator.app.remote import Found, fetch_logs, settled
from orchestrator.app.snapshots import asker
from orchestrator.contract.messages.events import StepReached
from orchestrator.contract.read_json import read_json
from orchestrator.dashboard.event_text import event_line
from orchestrator.dashboard.follow.follow_loop import EndDetector, log_lines
from orchestrator.journal.journal import Entry, read, to_json
from orchestrator.system import SystemClock


def event_of(entry: Entry) -> Event:
    body = to_json(entry)
    return Event(
        seq=entry.seq,
        at=entry.event.at,
        kind=body["event"]["kind"],
        text=event_line(entry, None),
        data=body["event"],
        actions=tuple(body["actions"]),
    )


def metrics_of(found: Found) -> list[Metric]:
    """Steps of `metrics.jsonl`; else those that the agents read from the log (`run.metrics`)."""
    run_dir = found.run_dir
    return _trained(_written(run_dir.metrics)) or _trained(_reported(run_dir.journal))


def _trained(metrics: Iterable[Metric]) -> list[Metric]:
    found: list[Metric] = []
    for metric in metrics:
        while found and found[-1].step >= metric.step:
            found.pop()  # the steps are repeated after a resume
        found.append(metric)
    return found


def _written(path: Path) -> Iterator[Metric]:
    """Lines that cannot be read are ignored, also an incomplete last one."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                yield _metric(read_json(line))
            except (ValueError, KeyError, TypeError, OverflowError):
                continue


def _reported(journal: Path) -> Iterator[Metric]:
    for event in (entry.event for entry in read(journal)):
        if isinstance(event, StepReached):
            values = {"loss": event.loss, "tokens_per_second": event.tokens_per_second}
            yield Metric(step=event.step, attempt=event.attempt, time=event.at, values=values)


def _metric(body: Any) -> Metric:
    if not isinstance(body, dict):
        raise TypeError("a metric is an object")
    values = {name: _value(value) for name, value in body.items()}
    at = values.pop("time", None)
    return Metric(
        step=int(body["step"]),
        attempt=int(body["attempt"]),
        time=at if isinstance(at, float | int) else None,
        values={name: one for name, one in values.items() if name not in ("step", "attempt")},
    )


def _value(value: Any) -> float | str | None:
    """None for a number that is not finite, and for lists and mappings."""
    if isinstance(value, str):
        return value
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def log_lines_of(
    found: Found, rank: int | None, attempt: int | None, tail: int | None, follow: bool
) -> Iterator[LogLine]:
    """Lines as `ndctl logs` finds them. Warns of logs of pods that cannot be read."""
    clock = SystemClock()
    warnings_of(fetch_logs(found, rank, attempt))
    ask = asker(found, os.environ, clock)
    ended = settled(found, EndDetector(found.run_dir, clock, ask), clock)
    for line in log_lines(found.run_dir, clock, ended, rank, attempt, tail, follow):
        file = line.file
        program = file.program if file.rank is None else "rank"
        yield LogLine(host=file.host, rank=file.rank, program=program, text=line.text)


def with_first(lines: Iterator[LogLine]) -> Iterator[LogLine]:
    """`lines`, the first of which is read now: errors are raised here, and not in a later loop."""
    first = list(itertools.islice(lines, 1))
    return itertools.chain(first, lines)


def during(context: AbstractContextManager[None], lines: Iterator[LogLine]) -> Iterator[LogLine]:
    with context:
        yield from lines

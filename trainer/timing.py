"""Where the time of a step goes, measured without making the host wait for the device."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

Part = Literal["data", "passes", "forward", "backward", "optimizer", "checkpoint"]


class Event(Protocol):
    """A mark in the device's queue of work, as torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds up to `end_event`."""


class Stopwatch:
    """Seconds of each part since the last `take`.

    On a GPU the parts of a step run long after the host has asked for them, so they are measured
    between events in its queue, and only once those have passed: a part that is still running when
    `take` is called counts in the next one. That is the update, which therefore shows beside the
    step after it, as it does in the time between two steps.
    """

    def __init__(self, new_event: Callable[[], Event] | None = None) -> None:
        self._new_event = new_event
        self._seconds: defaultdict[Part, float] = defaultdict(float)
        self._running: list[tuple[Part, Event, Event]] = []

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Of the work that the device is given inside."""
        if self._new_event is None:
            with self.host_part(part):
                yield
            return
        begin, end = self._new_event(), self._new_event()
        begin.record()
        yield
        end.record()
        self._running.append((part, begin, end))

    @contextmanager
    def host_part(self, part: Part) -> Iterator[None]:
        """Of the time that the host spends inside."""
        begun = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - begun

    def take(self) -> dict[Part, float]:
        """The seconds of the parts that are over; none of a part that did not occur."""
        running, self._running = self._running, []
        for part, begin, end in running:
            if end.query():
                self._seconds[part] += begin.elapsed_time(end) / 1e3
            else:
                self._running.append((part, begin, end))
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


def stopwatch(device: torch.device) -> Stopwatch:
    if device.type != "cuda":
        return Stopwatch()
    return Stopwatch(lambda: torch.cuda.Event(enable_timing=True))

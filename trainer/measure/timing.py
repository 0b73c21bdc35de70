"""Measures the parts of a step without making the host wait for the device."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

Part = Literal["data", "passes", "forward", "backward", "optimizer", "checkpoint", "own"]
"""`own` is the time between two collectives, when this rank does not wait for another."""


class Event(Protocol):
    """A mark in the device's queue, as torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`."""


class Stopwatch:
    """Seconds of each part since the last `take`.

    A GPU runs a part long after the host has queued it. So a part is measured between two events in
    the device's queue, and it counts once both have passed: a part that is still running at `take`
    counts in the next one. The optimizer update is such a part, so its time appears one step later.
    """

    def __init__(
        self,
        new_event: Callable[[], Event] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._new_event = new_event
        self._clock = clock
        self._seconds: defaultdict[Part, float] = defaultdict(float)
        self._running: list[tuple[Part, Event, Event]] = []
        self._own_since: float | Event | None = None

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Measure the device's work that is queued inside."""
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
        """Measure the host's time inside."""
        begun = self._clock()
        yield
        self._seconds[part] += self._clock() - begun

    def after_collective(self) -> None:
        """A collective has ended; from here on this rank does its own work."""
        if self._new_event is None:
            self._own_since = self._clock()
            return
        begin = self._new_event()
        begin.record()
        self._own_since = begin

    def before_collective(self) -> None:
        """This rank is about to enter a collective, so its own work ends here."""
        begin, self._own_since = self._own_since, None
        if begin is None:
            return
        if isinstance(begin, float):
            self._seconds["own"] += self._clock() - begin
            return
        assert self._new_event is not None
        end = self._new_event()
        end.record()
        self._running.append(("own", begin, end))

    @contextmanager
    def not_own_work(self) -> Iterator[None]:
        """The time inside (a save, a log line) does not count as this rank's work for a step."""
        self.before_collective()
        yield
        self.after_collective()

    def pop_seconds(self) -> dict[Part, float]:
        """Seconds of the parts that have ended. Parts that did not occur are missing."""
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

"""Where the time of a step goes, measured without making the host wait for the device."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

Part = Literal["data", "passes", "forward", "backward", "optimizer", "checkpoint", "own"]
"""`own`: between two collectives, where this rank waits for no other."""


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
        self._alone_since: float | Event | None = None

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
        begun = self._clock()
        yield
        self._seconds[part] += self._clock() - begun

    def leaves(self) -> None:
        """All ranks have come to the end of a collective: from here on this one works alone."""
        if self._new_event is None:
            self._alone_since = self._clock()
            return
        begin = self._new_event()
        begin.record()
        self._alone_since = begin

    def enters(self) -> None:
        """This rank is about to enter a collective, or to do what no other does and all excuse."""
        begin, self._alone_since = self._alone_since, None
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
    def excused(self) -> Iterator[None]:
        """What happens inside is none of this rank's work for a step."""
        self.enters()
        yield
        self.leaves()

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

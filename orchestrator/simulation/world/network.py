"""Connections between hosts: ordered and fast, except during a fault.

The faults are harder than those of TCP. A message may be duplicated, delayed or reordered while the
connection stays open, and a lost message breaks the connection only some seconds and messages
later.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from orchestrator.simulation.clock import Timeline

SCHEDULER = "scheduler"
STORAGE = "storage"
OUTSIDE = {SCHEDULER, STORAGE}
NOTICED_S = 10.0
"""Longest time until TCP closes a connection that lost a message."""


@dataclass(slots=True, eq=False)
class Line:
    """A connection between two hosts. Messages in flight are lost when it closes."""

    one: str
    other: str
    open: bool = True
    free_at: dict[str, float] = field(default_factory=dict)
    """Sender -> arrival time of its last message."""
    broken: Callable[[], None] | None = None
    """Called when the connection breaks."""

    def breaks(self) -> None:
        if self.open:
            self.open = False
            if self.broken is not None:
                self.broken()


@dataclass(slots=True)
class Weather:
    """Chances in percent of each message fault, until the time `until`."""

    until: float = 0.0
    lost: int = 0
    doubled: int = 0
    late: int = 0
    reordered: int = 0


@dataclass(slots=True)
class Network:
    timeline: Timeline
    random: Random
    weather: Weather = field(default_factory=Weather)
    apart: dict[str, int] = field(default_factory=dict)
    """Host, scheduler or storage -> its side of the partition; 0 if it is not listed."""
    deaf: dict[str, int] = field(default_factory=dict)
    """Like `apart`, but hosts on all sides reach the scheduler and the storage."""

    def reaches(self, one: str, other: str) -> bool:
        if self.apart.get(one, 0) != self.apart.get(other, 0):
            return False
        return bool(OUTSIDE & {one, other}) or self.deaf.get(one, 0) == self.deaf.get(other, 0)

    def send(self, line: Line, sender: str, arrive: Callable[[], None]) -> None:
        delay, now = 0.002 + 0.01 * self.random.random(), self.timeline.now
        times, ordered = 1, True
        if now < self.weather.until:
            drawn = self.random.randrange(100)
            if drawn < self.weather.lost:
                self.timeline.after(NOTICED_S * self.random.random(), line.breaks)
            times = 0 if drawn < self.weather.lost else 1 + (drawn > 99 - self.weather.doubled)
            if self.random.randrange(100) < self.weather.late:
                delay += 20.0 * self.random.random()
            ordered = self.random.randrange(100) >= self.weather.reordered
        for _ in range(times):
            at = now + delay
            if ordered:
                at = max(at, line.free_at.get(sender, 0.0))
                line.free_at[sender] = at
            self.timeline.after(at - now, partial(self._arrives, line, arrive))
            delay += self.random.random()

    def _arrives(self, line: Line, arrive: Callable[[], None]) -> None:
        if line.open and self.reaches(line.one, line.other):
            arrive()

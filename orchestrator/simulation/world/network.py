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
LOSS_NOTICED_S = 10.0
"""Longest time until TCP closes a connection that lost a message."""


@dataclass(slots=True, eq=False)
class Connection:
    """A connection between two hosts. Messages in flight are lost when it closes."""

    one: str
    other: str
    open: bool = True
    free_at: dict[str, float] = field(default_factory=dict)
    """Sender -> arrival time of its last message."""
    on_break: Callable[[], None] | None = None
    """Called when the connection breaks."""

    def break_now(self) -> None:
        if self.open:
            self.open = False
            if self.on_break is not None:
                self.on_break()


@dataclass(slots=True)
class MessageFaults:
    """Chances in percent of each message fault, until the time `until`."""

    until: float = 0.0
    lost: int = 0
    duplicated: int = 0
    delayed: int = 0
    reordered: int = 0


@dataclass(slots=True)
class Network:
    timeline: Timeline
    random: Random
    message_faults: MessageFaults = field(default_factory=MessageFaults)
    sides: dict[str, int] = field(default_factory=dict)
    """Host, scheduler or storage -> its side of the partition; 0 if it is not listed."""
    host_sides: dict[str, int] = field(default_factory=dict)
    """Like `sides`, but hosts on all sides reach the scheduler and the storage."""

    def reaches(self, one: str, other: str) -> bool:
        if self.sides.get(one, 0) != self.sides.get(other, 0):
            return False
        return bool(OUTSIDE & {one, other}) or self.host_sides.get(one, 0) == self.host_sides.get(
            other, 0
        )

    def send(self, connection: Connection, sender: str, arrive: Callable[[], None]) -> None:
        delay, now = 0.002 + 0.01 * self.random.random(), self.timeline.now
        times, ordered = 1, True
        if now < self.message_faults.until:
            draw = self.random.randrange(100)
            if draw < self.message_faults.lost:
                self.timeline.after(LOSS_NOTICED_S * self.random.random(), connection.break_now)
            times = (
                0
                if draw < self.message_faults.lost
                else 1 + (draw > 99 - self.message_faults.duplicated)
            )
            if self.random.randrange(100) < self.message_faults.delayed:
                delay += 20.0 * self.random.random()
            ordered = self.random.randrange(100) >= self.message_faults.reordered
        for _ in range(times):
            at = now + delay
            if ordered:
                at = max(at, connection.free_at.get(sender, 0.0))
                connection.free_at[sender] = at
            self.timeline.after(at - now, partial(self._deliver, connection, arrive))
            delay += self.random.random()

    def _deliver(self, connection: Connection, arrive: Callable[[], None]) -> None:
        if connection.open and self.reaches(connection.one, connection.other):
            arrive()

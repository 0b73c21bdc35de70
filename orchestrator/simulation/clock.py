"""Virtual time: what happens next, and nothing between."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

EPOCH = 1_700_000_000.0
"""Unix seconds of the virtual beginning."""

Happening = Callable[[], None]


@dataclass(slots=True)
class Timeline:
    """Happenings in order of their time; those of one moment in the order they were set."""

    now: float = 0.0
    happened: int = 0
    _ahead: list[tuple[float, int, Happening]] = field(default_factory=list)
    _count: int = 0
    ready: deque[Happening] = field(default_factory=deque)
    """What follows at this moment, before the next happening."""

    def after(self, seconds: float, happen: Happening) -> None:
        self._count += 1
        heapq.heappush(self._ahead, (self.now + seconds, self._count, happen))

    def turn(self) -> bool:
        """Let the next thing happen; False when there is none."""
        ready = self.ready
        while ready:
            ready.popleft()()
        if not self._ahead:
            return False
        self.now, _, happen = heapq.heappop(self._ahead)
        self.happened += 1
        happen()
        while ready:
            ready.popleft()()
        return True


@dataclass(slots=True)
class HostClock:
    """The wall clock of a host, which may be wrong and may jump, and its monotonic one."""

    timeline: Timeline
    offset: float = 0.0

    def now(self) -> float:
        return EPOCH + self.timeline.now + self.offset

    def monotonic(self) -> float:
        return self.timeline.now

    def sleep(self, seconds: float, /) -> None:
        raise AssertionError("nobody waits in virtual time")

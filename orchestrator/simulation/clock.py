"""Virtual time, which jumps from one event to the next."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

EPOCH = 1_700_000_000.0
"""Unix time at virtual time 0."""

Callback = Callable[[], None]


@dataclass(slots=True)
class Timeline:
    """Callbacks in the order of their times; callbacks of the same time in the order of `after`."""

    now: float = 0.0
    callbacks_run: int = 0
    _scheduled: list[tuple[float, int, Callback]] = field(default_factory=list)
    _count: int = 0
    ready: deque[Callback] = field(default_factory=deque)
    """Callbacks of the current time, which run before the next one in `_ahead`."""

    def after(self, seconds: float, callback: Callback) -> None:
        self._count += 1
        heapq.heappush(self._scheduled, (self.now + seconds, self._count, callback))

    def run_next(self) -> bool:
        """Run the next callback. False: there is none."""
        ready = self.ready
        while ready:
            ready.popleft()()
        if not self._scheduled:
            return False
        self.now, _, callback = heapq.heappop(self._scheduled)
        self.callbacks_run += 1
        callback()
        while ready:
            ready.popleft()()
        return True


@dataclass(slots=True)
class HostClock:
    """Wall clock and monotonic clock of a host. The wall clock may be wrong and may jump."""

    timeline: Timeline
    offset: float = 0.0

    def now(self) -> float:
        return EPOCH + self.timeline.now + self.offset

    def monotonic(self) -> float:
        return self.timeline.now

    def sleep(self, seconds: float, /) -> None:
        raise AssertionError("code in virtual time must not block")

"""Calls that may hang with the storage, on a few threads.

A call that hangs keeps its thread, another thread takes its place, and the other calls go on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

SIZE = 8
"""Threads that work at the same time."""
SLOW_S = 2.0
"""A call that takes longer no longer counts among the `SIZE`, and is not waited for."""
MOST = 64
"""Threads in all. When so many hang, further calls wait for one of them."""

Call = Callable[[], object]


class Crew:
    """Each call has a key, and of each key at most one call is queued or under way."""

    def __init__(self, size: int = SIZE, slow_s: float = SLOW_S, most: int = MOST) -> None:
        self._size, self._slow_s, self._most = size, slow_s, most
        self._changed = threading.Condition()
        self._queued: deque[tuple[Hashable, Call]] = deque()
        self._began: dict[Hashable, float] = {}
        """Calls under way -> since when, on the monotonic clock."""
        self._keys: set[Hashable] = set()
        """Calls that are queued or under way."""

    def give(self, key: Hashable, call: Call) -> None:
        """Have `call` run, unless a call of this key has not ended yet. It handles its own errors:
        one that it raises is only logged."""
        with self._changed:
            if key not in self._keys:
                self._keys.add(key)
                self._queued.append((key, call))
                self._start_threads()

    def wait(self, seconds: float) -> None:
        """Until all calls have ended, except for those that take long; at most `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            while (now := time.monotonic()) < until and self._pending(now):
                self._start_threads()
                self._changed.wait(min(until - now, self._slow_s / 4))

    def unfinished(self) -> set[Hashable]:
        """Keys of the calls that are queued or under way."""
        with self._changed:
            return set(self._keys)

    def busy_s(self, key: Hashable) -> float:
        """Seconds since the call of this key began; 0 if none is under way."""
        with self._changed:
            began = self._began.get(key)
        return 0.0 if began is None else time.monotonic() - began

    def _pending(self, now: float) -> bool:
        quick = any(now - began < self._slow_s for began in self._began.values())
        return quick or (bool(self._queued) and len(self._began) < self._most)

    def _start_threads(self) -> None:
        while (taken := self._take()) is not None:
            threading.Thread(target=self._work, args=taken, name="crew", daemon=True).start()

    def _take(self) -> tuple[Hashable, Call] | None:
        """The next call, if there is a thread for it."""
        now = time.monotonic()
        quick = sum(now - began < self._slow_s for began in self._began.values())
        if not self._queued or quick >= self._size or len(self._began) >= self._most:
            return None
        key, call = self._queued.popleft()
        self._began[key] = now
        return key, call

    def _work(self, key: Hashable, call: Call) -> None:
        taken: tuple[Hashable, Call] | None = (key, call)
        while taken is not None:
            key, call = taken
            try:
                call()
            except Exception:
                log.exception("the call %s failed", key)
            with self._changed:
                del self._began[key]
                self._keys.discard(key)
                taken = self._take()
                if taken is None:
                    self._changed.notify_all()

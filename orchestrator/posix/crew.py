"""Calls that may hang with the storage, on a few threads.

A call that hangs keeps its thread, another thread takes its place, and the other calls go on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable

from msgspec import Struct

log = logging.getLogger(__name__)

SIZE = 8
"""Threads that work at the same time."""
SLOW_S = 3.0
"""A call that takes longer no longer counts among the `SIZE`, and is not waited for."""
MOST_HANGING = 8
"""When so many calls about one file system take long, it seems to be lost, and no more begin."""
MOST = 128
"""Threads in all."""

Call = Callable[[], object]


class Task(Struct, frozen=True):
    """A call, with the arguments of `Crew.give`."""

    key: Hashable
    call: Call
    storage: Hashable = None


class Crew:
    """Each call has a key, and of each key at most one call is queued or under way."""

    def __init__(self, size: int = SIZE, slow_s: float = SLOW_S, most: int = MOST) -> None:
        self._size, self.slow_s, self._most = size, slow_s, most
        self._changed = threading.Condition()
        self._queued: deque[Task] = deque()
        self._began: dict[Hashable, tuple[float, Hashable]] = {}
        """Calls under way -> since when, on the monotonic clock, and about which storage."""
        self._keys: set[Hashable] = set()
        """Calls that are queued or under way."""

    def give(self, key: Hashable, call: Call, storage: Hashable = None) -> None:
        """Have `call` run, unless a call of this key has not ended yet. It handles its own errors:
        one that it raises is only logged.

        Args:
            storage: what hangs together with it, such as a run root. If that seems to be lost, the
                call is dropped. None: nothing.
        """
        self.give_all([Task(key, call, storage)])

    def give_all(self, tasks: Iterable[Task]) -> None:
        """As `give`, for many calls. Given one by one, short calls would need a thread each."""
        with self._changed:
            for task in tasks:
                if task.key not in self._keys:
                    self._keys.add(task.key)
                    self._queued.append(task)
            self._start_threads()

    def wait(self, seconds: float) -> None:
        """Until all calls have ended, except for those that take long; at most `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            while (now := time.monotonic()) < until:
                self._start_threads()
                is_full = len(self._began) >= self._most
                if not self._quick(now) and (is_full or not self._queued):
                    return
                self._changed.wait(min(until - now, self.slow_s / 4))

    def unfinished(self) -> set[Hashable]:
        """Keys of the calls that are queued or under way."""
        with self._changed:
            return set(self._keys)

    def busy_s(self, key: Hashable) -> float:
        """Seconds since the call of this key began; 0 if none is under way."""
        now = time.monotonic()
        with self._changed:
            began, _ = self._began.get(key, (now, None))
        return now - began

    def is_lost(self, storage: Hashable) -> bool:
        """Whether so many calls about this storage take long that no more begin."""
        with self._changed:
            return self._is_lost(storage, time.monotonic())

    def _is_lost(self, storage: Hashable, now: float) -> bool:
        long = (at for at, about in self._began.values() if about == storage)
        return storage is not None and sum(now - at >= self.slow_s for at in long) >= MOST_HANGING

    def _quick(self, now: float) -> int:
        return sum(now - began < self.slow_s for began, _ in self._began.values())

    def _start_threads(self) -> None:
        while (task := self._take()) is not None:
            threading.Thread(target=self._work, args=(task,), name="crew", daemon=True).start()

    def _take(self) -> Task | None:
        """The next call, if there is a thread for it."""
        now = time.monotonic()
        if self._quick(now) >= self._size or len(self._began) >= self._most:
            return None
        while self._queued:
            task = self._queued.popleft()
            if not self._is_lost(task.storage, now):
                self._began[task.key] = (now, task.storage)
                return task
            self._keys.discard(task.key)
        return None

    def _work(self, first: Task) -> None:
        task: Task | None = first
        while task is not None:
            try:
                task.call()
            except Exception:
                log.exception("the call %s failed", task.key)
            with self._changed:
                del self._began[task.key]
                self._keys.discard(task.key)
                task = self._take()
                if task is None:
                    self._changed.notify_all()

"""Heartbeats of thousands of processes in a TCPStore, which one thread of rank 0 serves.

Each process increments a counter of its own. Only rank 0 reads all counters, in one request, and
writes the list of ranks whose counter did not change between two reads. Other ranks read that list,
so the load per process does not grow with the number of processes. No call waits inside the store,
because a waiting connection would delay the heartbeats.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import Store

BEAT_S = 0.2
LOOK_S = 1.0
"""Time between two reads. A rank whose counter did not change in between is missing."""
LATE_S = 0.5
"""A slower read is discarded: the store is then equally late with the heartbeats."""
POLL_S = 0.2
ANSWER_S = 3.0
"""Enough for two reads after a question, and for their result."""
GONE = 1 << 40
"""A process that ends normally adds this to its counter."""
LOOKS, MISSING = "looks", "missing"

Pause = Callable[[float], None]


def pause(seconds: float) -> None:
    threading.Event().wait(max(0.0, seconds))


@dataclass
class HeartbeatClient:
    """One process's connection to the store, made once at the start."""

    rank: int
    connect: Callable[[], Store]
    """Raises RuntimeError if the store is unreachable."""
    store: Store | None = None
    connected: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        """Send heartbeats until `leave`; raises RuntimeError if the store is lost."""
        self.store = self.connect()
        self.connected.set()
        while not self.left.wait(BEAT_S):
            self.store.add(_beat(self.rank), 1)

    def ask(self) -> tuple[int, ...] | None:
        """Missing ranks; None if the store was never reached."""
        if not self.connected.wait(ANSWER_S / 2) or self.store is None:
            return None
        return missing(self.store)

    def leave(self) -> None:
        """Tell the store that this process ends. Rank 0 waits for it, so it is always sent."""
        self.left.set()
        (self.store or self.connect()).add(_beat(self.rank), GONE)


# Rank 0


def prepare(store: Store, count: int) -> None:
    """Create all keys, because a read of a missing key would wait. Existing counts are kept."""
    store.set(MISSING, "")
    for rank in range(count):
        store.add(_beat(rank), 0)


def watch(
    store: Store, count: int, clock: Callable[[], float] = time.monotonic, pause: Pause = pause
) -> None:
    """Read the counters in a loop; raises RuntimeError when the store is lost."""
    before = beats(store, count)
    while True:
        pause(LOOK_S)
        begun = clock()
        after = beats(store, count)
        if clock() - begun <= LATE_S:
            store.set(MISSING, " ".join(map(str, stopped_ranks(before, after))))
            store.add(LOOKS, 1)
        before = after


def beats(store: Store, count: int) -> list[int]:
    return [int(beat) for beat in store.multi_get(list(map(_beat, range(count))))]


def stopped_ranks(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Ranks whose counter did not change, except those that ended normally."""
    pairs = enumerate(zip(before, after, strict=True))
    return [rank for rank, (one, two) in pairs if one == two < GONE]


def all_gone(store: Store, count: int) -> bool:
    """True if all ranks except rank 0 have ended normally."""
    return min(beats(store, count)[1:], default=GONE) >= GONE


# All ranks


def missing(store: Store, pause: Pause = pause) -> tuple[int, ...]:
    """Ranks without a heartbeat; waits until rank 0 has made two reads after this call."""
    asked = store.add(LOOKS, 0)
    while store.add(LOOKS, 0) < asked + 2:
        pause(POLL_S)
    return tuple(map(int, store.get(MISSING).split()))


def _beat(rank: int) -> str:
    return f"beat/{rank}"

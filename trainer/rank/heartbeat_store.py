"""Signs of life of thousands of processes, in a store that one thread of rank 0 serves.

Each process counts up a beat of its own. Rank 0 alone looks at the beats of all, in one request,
and writes down whose stood still between two looks; whoever wants to know reads that. What a
process asks of the store does not grow with their number, and no wait is ever left to the store:
a connection that waits would hold up the beats.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import Store

BEAT_S = 0.2
LOOK_S = 1.0
"""Between two looks: who has not moved in between is no longer there."""
LATE_S = 0.5
"""A look that takes longer says nothing of anybody: the store is as far behind with the beats."""
POLL_S = 0.2
ANSWER_S = 3.0
"""For two looks at all after a question, and for reading what they found."""
GONE = 1 << 40
"""Added to its beat by a process that leaves in good order."""
LOOKS, MISSING = "looks", "missing"

Pause = Callable[[float], None]


def pause(seconds: float) -> None:
    threading.Event().wait(max(0.0, seconds))


@dataclass
class Signs:
    """One process's end: a connection that is made once, while nobody is in a hurry."""

    rank: int
    connect: Callable[[], Store]
    """Raises RuntimeError where the store cannot be reached."""
    store: Store | None = None
    connected: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        """Until it leaves, or the store is gone, which raises RuntimeError."""
        self.store = self.connect()
        self.connected.set()
        while not self.left.wait(BEAT_S):
            self.store.add(_beat(self.rank), 1)

    def ask(self) -> tuple[int, ...] | None:
        """The ranks that are missing; None where the store was never reached."""
        if not self.connected.wait(ANSWER_S / 2) or self.store is None:
            return None
        return missing(self.store)

    def leave(self) -> None:
        """Say so, also where the first beat is still to come: rank 0 waits for this."""
        self.left.set()
        (self.store or self.connect()).add(_beat(self.rank), GONE)


# Rank 0


def prepare(store: Store, count: int) -> None:
    """To read a key that is not there would wait for it. What came before stays."""
    store.set(MISSING, "")
    for rank in range(count):
        store.add(_beat(rank), 0)


def watch(
    store: Store,
    count: int,
    clock: Callable[[], float] = time.monotonic,
    pause: Pause = pause,
) -> None:
    """Look again and again, until the store is gone, which raises RuntimeError."""
    before = beats(store, count)
    while True:
        pause(LOOK_S)
        begun = clock()
        after = beats(store, count)
        if clock() - begun <= LATE_S:
            store.set(MISSING, " ".join(map(str, still(before, after))))
            store.add(LOOKS, 1)
        before = after


def beats(store: Store, count: int) -> list[int]:
    return [int(beat) for beat in store.multi_get(list(map(_beat, range(count))))]


def still(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The ranks that did not move, but those that have left. Pure."""
    pairs = enumerate(zip(before, after, strict=True))
    return [rank for rank, (one, two) in pairs if one == two < GONE]


def all_gone(store: Store, count: int) -> bool:
    """All but rank 0, which asks."""
    return min(beats(store, count)[1:], default=GONE) >= GONE


# Everybody


def missing(store: Store, pause: Pause = pause) -> tuple[int, ...]:
    """The ranks that stood still after this was asked, once rank 0 has looked for that long."""
    asked = store.add(LOOKS, 0)
    while store.add(LOOKS, 0) < asked + 2:
        pause(POLL_S)
    return tuple(map(int, store.get(MISSING).split()))


def _beat(rank: int) -> str:
    return f"beat/{rank}"

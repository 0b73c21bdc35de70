"""The turn of agents that are left without a leader: one after the other, by a file lock.

A thousand that act at once are more than a scheduler bears, and two that lead are one too many.
"""

import contextlib
from dataclasses import dataclass, field
from typing import IO

from orchestrator.posix.locks import try_lock
from orchestrator.seams import Clock

TURN_S = 400.0
"""For the one whose turn it is: longer than Slurm takes to give up a node. A file server may keep
the lock of a host that died in its turn."""


@dataclass(slots=True)
class Turn:
    """Of the agents that are left, one after the other."""

    file: IO[str]
    clock: Clock
    mark: str
    """What one leaves for the others that finds that nothing is to be done."""
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock.monotonic()

    def has_come(self) -> bool:
        try:
            free = try_lock(self.file.fileno())
        except OSError:  # a file system without locks
            return True
        return free or self.clock.monotonic() - self.begun >= TURN_S

    def settle(self) -> None:
        with contextlib.suppress(OSError):  # no room: each looks for itself
            self.file.write(self.mark)
            self.file.flush()

    def is_settled(self) -> bool:
        self.file.seek(0)
        return self.mark in self.file.read()

    def close(self) -> None:
        """The next one's turn has come."""
        with contextlib.suppress(OSError):  # what `settle` wrote did not fit on the disk
            self.file.close()

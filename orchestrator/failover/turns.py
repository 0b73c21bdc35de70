"""The order in which agents without a leader act: one after the other, by a file lock.

A thousand agents that act at once would overload the scheduler, and only one may become the leader.
"""

import contextlib
from dataclasses import dataclass, field
from typing import IO

from orchestrator.posix.locks import try_lock
from orchestrator.seams import Clock

TURN_S = 400.0
"""Longest wait for a turn: longer than Slurm takes to give up a node. A file server may keep the
lock of a host that died."""


@dataclass(slots=True)
class Turn:
    """One agent's turn: it has come when the agent gets the lock."""

    file: IO[str]
    clock: Clock
    mark: str
    """Text that an agent writes to the file to tell the others that nothing is left to do."""
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
        with contextlib.suppress(OSError):  # the disk is full: each agent finds it out itself
            self.file.write(self.mark)
            # Other hosts read the file, so the mark must not stay in this process's buffer.
            self.file.flush()

    def is_settled(self) -> bool:
        # The file is open for appending, so it is at its end.
        self.file.seek(0)
        return self.mark in self.file.read()

    def close(self) -> None:
        """Release the lock, so that the next agent can act."""
        with contextlib.suppress(OSError):  # the text of `settle` did not fit on the disk
            self.file.close()

"""The files of the run directory that an agent without a leader uses: an interface, and its real
implementation.

All methods may block, so failover calls them in a worker thread.
"""

import os
from functools import partial
from tempfile import TemporaryFile
from typing import Protocol

from orchestrator.contract.files.fence import Fence, check_leader, read_fence, take_over
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.failover.journal_watch import Following, Seen, size_of
from orchestrator.failover.turns import Turn
from orchestrator.journal.journal import Journal
from orchestrator.journal.supervisor import OpenJournal
from orchestrator.seams import Clock

BLOCK = 4096
"""Bytes that a file system with no space left refuses."""


class AnyTurn(Protocol):
    """One agent's place in the order in which agents act. `Turn` implements it."""

    def has_come(self) -> bool:
        """Called repeatedly until it is true."""

    def settle(self) -> None:
        """Tell later agents that nothing is left to do."""

    def is_settled(self) -> bool:
        """Whether an earlier agent has called `settle`."""

    def close(self) -> None:
        """Let the next agent act."""


class Follows(Protocol):
    """Reads the journal. `Following` implements it."""

    def look(self) -> Seen:
        """The journal as it is now. Raises OSError and JobError."""


class FailoverStorage(Protocol):
    def read_fence(self) -> Fence | None:
        """Raises OSError."""

    def take_over(self, name: str) -> None:
        """Name a new leader in the fence, which stops the former one. Raises OSError."""

    def check_writable(self) -> None:
        """Raises OSError if this host cannot write to the run directory now."""

    def open_turn(self, mark: str) -> AnyTurn:
        """Called once, when an agent hears no leader. Raises OSError."""

    def journal_size(self) -> int:
        """In bytes. Raises OSError."""

    def follow(self, host: str) -> Follows:
        """The journal as the agent of `host` reads it."""

    def open_journal(self, name: str, patience_s: float) -> OpenJournal:
        """Open the journal for the leader `name`. Called after `take_over`.

        Raises InUse when another process still holds it after `patience_s`.
        """


class FailoverFiles:
    def __init__(self, run_dir: RunDir, clock: Clock) -> None:
        self.run_dir, self.clock = run_dir, clock

    def read_fence(self) -> Fence | None:
        return read_fence(self.run_dir.fence)

    def take_over(self, name: str) -> None:
        take_over(self.run_dir.fence, name)

    def check_writable(self) -> None:
        with TemporaryFile(dir=self.run_dir.path) as file:
            file.write(bytes(BLOCK))
            file.flush()
            os.fsync(file.fileno())

    def open_turn(self, mark: str) -> AnyTurn:
        return Turn(self.run_dir.requeue_lock.open("a+"), self.clock, mark)

    def journal_size(self) -> int:
        return size_of(self.run_dir.journal)

    def follow(self, host: str) -> Follows:
        return Following(self.run_dir, host)

    def open_journal(self, name: str, patience_s: float) -> OpenJournal:
        guard = partial(check_leader, self.run_dir.fence, name)
        return Journal(self.run_dir.journal, self.clock, patience_s, guard)

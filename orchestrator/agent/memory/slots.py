"""Memory of this host in which ranks keep checkpoints, and which outlives them.

It belongs to the agent, because the agent outlives ranks, torchrun and fork servers. It has no name
in any file system: whatever ends the agent, the kernel frees it.
"""

import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan, HostMemory
from orchestrator.contract.memory.slot_file import Label, label_of
from orchestrator.contract.messages.agent_protocol import Start

NAME = "ndctl-checkpoint"
ALONE, WITH_PARTNERS = 3, 4
"""Slots of a rank. While one is written to the disk and one is copied to partners, ranks go on with
two others."""


class MemorySlots:
    def __init__(self) -> None:
        self._files: list[list[int]] = []
        """Local rank -> its files."""
        self._others: list[int] = []
        """Files with checkpoints of another number of ranks, which ranks of this attempt read parts
        of: those of ranks that it does not have, and those that were fetched for it."""
        self._lock = threading.Lock()
        """For `_others`, which a partner's last copy frees in another thread."""

    def of_attempt(self, start: Start, copies: CopyPlan) -> HostMemory:
        """The slots for the ranks of an attempt. Complete slots of ranks that it does not have stay
        until `drop_others`.

        Raises:
            OSError: this process has too many files open.
        """
        with self._lock:
            while len(self._files) > start.ranks_per_host:
                self._others += self._files.pop()
            empty = [file for file in self._others if label_of(file) is None]
            self._others = [file for file in self._others if file not in empty]
            _close(empty)
        while len(self._files) < start.ranks_per_host:
            self._files.append([])
        wanted = WITH_PARTNERS if copies.partners else ALONE
        for files in self._files:
            while len(files) < wanted:
                files.append(new_file())
        # Ranks do not inherit the files: a rank may be a new program in its process (exec).
        return HostMemory(
            lineage=start.lineage,
            slots=tuple(paths(files) for files in self._files),
            resumed=copies.resumed,
            restored=copies.restored,
            copies=len(copies.partners),
        )

    def file(self, local_rank: int, slot: int) -> int | None:
        """None if there is no such slot."""
        known = local_rank < len(self._files) and slot < len(self._files[local_rank])
        return self._files[local_rank][slot] if known else None

    def labels(self) -> Iterator[tuple[int, Label]]:
        """The complete slots: file, and whose checkpoint it holds."""
        with self._lock:
            found = [(file, label_of(file)) for file in self._all()]
        for file, label in found:
            if label is not None:
                yield file, label

    def _all(self) -> Iterator[int]:
        return itertools.chain(*self._files, self._others)

    @property
    def others(self) -> Sequence[int]:
        return self._others

    def another(self) -> int:
        """A new file for a slot of another number of ranks. Raises OSError."""
        file = new_file()
        with self._lock:
            self._others.append(file)
        return file

    def drop_others(self) -> None:
        """No rank needs checkpoints of another number of ranks any more."""
        with self._lock:
            for file in self._others:
                os.ftruncate(file, 0)  # a rank may still have it open
            _close(self._others)
            self._others = []

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(os.fstat(file).st_size for file in self._all())

    def to_overwrite(self, local_rank: int, restored: Made) -> int:
        """The file of a slot that holds nothing of `restored`, the oldest of them."""
        labels = [(file, label_of(file)) for file in self._files[local_rank]]
        # A slot of `restored` may be another rank's, which another host is fetching now.
        free = [(file, label) for file, label in labels if label is None or label.made != restored]
        return min(free, key=lambda pair: pair[1].made if pair[1] else Made(step=-1, attempt=0))[0]

    def close(self) -> None:
        while self._files:
            _close(self._files.pop())
        self.drop_others()


def new_file() -> int:
    """A file in memory without a name. Raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this Python was built for a C library without memfd_create")
    return os.memfd_create(NAME, os.MFD_CLOEXEC)


def paths(files: Iterable[int]) -> tuple[str, ...]:
    """How other processes of this host open the files."""
    return tuple(f"/proc/{os.getpid()}/fd/{file}" for file in files)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)

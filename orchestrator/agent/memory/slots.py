"""Memory of this host in which ranks keep checkpoints, and which outlives them.

It belongs to the agent, because the agent outlives ranks, torchrun and fork servers. It has no name
in any file system: whatever ends the agent, the kernel frees it.
"""

import os
from collections.abc import Iterator

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan, HostMemory
from orchestrator.contract.memory.slot_file import Label, label_of
from orchestrator.contract.messages.agent_protocol import Start

NAME = "ndctl-checkpoint"
ALONE, WITH_PARTNERS = 2, 3
"""Slots of a rank. While one is copied to partners, ranks go on with two others."""


class MemorySlots:
    def __init__(self) -> None:
        self._files: list[list[int]] = []
        """Local rank -> its files."""

    def of_attempt(self, start: Start, copies: CopyPlan) -> HostMemory:
        """The slots for the ranks of an attempt. Slots of ranks that it does not have are freed.

        Raises:
            OSError: this process has too many files open.
        """
        while len(self._files) > start.ranks_per_host:
            _close(self._files.pop())
        while len(self._files) < start.ranks_per_host:
            self._files.append([])
        wanted = WITH_PARTNERS if copies.partners else ALONE
        for files in self._files:
            while len(files) < wanted:
                files.append(new_file())
        # Ranks do not inherit the files: a rank may be a new program in its process (exec).
        pid = os.getpid()
        return HostMemory(
            lineage=start.lineage,
            slots=tuple(tuple(f"/proc/{pid}/fd/{one}" for one in files) for files in self._files),
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
        for files in self._files:
            for file in files:
                if (label := label_of(file)) is not None:
                    yield file, label

    @property
    def num_bytes(self) -> int:
        return sum(os.fstat(file).st_size for files in self._files for file in files)

    def to_overwrite(self, local_rank: int, restored: Made) -> int:
        """The file of a slot that holds nothing of `restored`, the oldest of them."""
        labels = [(file, label_of(file)) for file in self._files[local_rank]]
        # A slot of `restored` may be another rank's, which another host is fetching now.
        free = [(file, label) for file, label in labels if label is None or label.made != restored]
        return min(free, key=lambda pair: pair[1].made if pair[1] else Made(step=-1, attempt=0))[0]

    def close(self) -> None:
        while self._files:
            _close(self._files.pop())


def new_file() -> int:
    """A file in memory without a name. Raises OSError."""
    return os.memfd_create(NAME, os.MFD_CLOEXEC)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)

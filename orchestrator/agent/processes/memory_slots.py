"""Memory of this host in which ranks keep checkpoints, and which outlives them.

It belongs to the agent, because the agent outlives ranks, torchrun and fork servers. It has no name
in any file system: whatever ends the agent, the kernel frees it.
"""

import os

from orchestrator.contract.files.env import HostMemory
from orchestrator.contract.messages.agent_protocol import Start

NAME = "ndctl-checkpoint"


class MemorySlots:
    def __init__(self) -> None:
        self._files: list[tuple[int, int]] = []
        """Local rank -> its files."""

    def of_attempt(self, start: Start) -> HostMemory:
        """The slots for the ranks of an attempt. Slots of ranks that it does not have are freed.

        Raises:
            OSError: this process has too many files open.
        """
        while len(self._files) > start.ranks_per_host:
            _close(self._files.pop())
        while len(self._files) < start.ranks_per_host:
            self._files.append((_new(), _new()))
        # Ranks do not inherit the files: a rank may be a new program in its process (exec).
        pid = os.getpid()
        slots = tuple((f"/proc/{pid}/fd/{a}", f"/proc/{pid}/fd/{b}") for a, b in self._files)
        return HostMemory(lineage=start.lineage, slots=slots)

    def close(self) -> None:
        while self._files:
            _close(self._files.pop())


def _new() -> int:
    return os.memfd_create(NAME, os.MFD_CLOEXEC)


def _close(files: tuple[int, int]) -> None:
    for file in files:
        os.close(file)

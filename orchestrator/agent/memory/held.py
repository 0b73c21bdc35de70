"""The copies that this host keeps of slots of other hosts, two for each of their ranks.

One is always of a step that all ranks have copies of; the other one is written. The memory is
freed when the agent ends.
"""

import contextlib
import os
import threading
from collections.abc import Collection, Iterator

from orchestrator.agent.memory.slots import new_file
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.slot_file import Label, clear, complete, label_of

COPIES = 2


class Refused(Exception):
    """This host does not keep the copy; the message says why."""


class HeldCopies:
    """Called from many threads."""

    def __init__(self) -> None:
        self._files: dict[int, list[int]] = {}
        """Rank -> the files of its copies."""
        self._writing: set[int] = set()
        """Files that a thread is receiving."""
        self._shared: dict[int, Made] = {}
        """Rank -> the newest checkpoint that all ranks have copies of, as far as is known here."""
        self._lock = threading.Lock()
        self.holds: frozenset[int] = frozenset()
        self.attempt = 0
        self._ended = False
        """Nothing is kept in this attempt any more."""

    def allow(self, ranks: Collection[int], attempt: int) -> None:
        """From now on keep copies of these ranks. Those of other ranks stay until all ranks have
        copies of a checkpoint of this attempt, because until then they may be the only ones."""
        with self._lock:
            self.holds, self.attempt, self._ended = frozenset(ranks), attempt, False

    def give_back(self) -> None:
        """Keep nothing until the next `allow`."""
        with self._lock:
            self.holds, self._ended = frozenset(), True
            for rank in list(self._files):
                self._drop(rank)

    def begin(self, label: Label, num_bytes: int) -> int:
        """The file into which the copy must be written. Until `commit` it is not complete.

        Raises:
            Refused: with the reason.
        """
        with self._lock:
            if label.rank not in self.holds or label.made.attempt != self.attempt:
                raise Refused(f"it keeps no copy of rank {label.rank}")
            if label.shared is not None:
                self._shared[label.rank] = label.shared
            file = self._to_overwrite(label.rank)
            clear(file)
            self._writing.add(file)
        try:
            if os.fstat(file).st_size != num_bytes:
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, num_bytes)
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
            self.end(file)
            raise Refused(f"its kernel refuses {num_bytes} bytes: {exc.strerror}") from exc
        return file

    def _to_overwrite(self, rank: int) -> int:
        files = self._files.setdefault(rank, [])
        free = [file for file in files if file not in self._writing]
        labels = {file: label_of(file) for file in free}
        empty = next((file for file, label in labels.items() if label is None), None)
        if empty is not None:
            return empty
        if len(files) < COPIES:
            files.append(new_file())
            return files[-1]
        shared = self._shared.get(rank)
        made = {file: label.made for file, label in labels.items() if label is not None}
        stays = next((file for file in free if made[file] == shared), None)
        if stays is None:
            stays = max(free, key=lambda file: made[file], default=None)
        spare = [file for file in free if file != stays]
        if not spare:
            raise Refused(f"it is receiving another copy of rank {rank}")
        return spare[0]

    def commit(self, file: int, header_bytes: int) -> bool:
        """All bytes are written: the copy is complete. Whether all ranks have copies of a
        checkpoint of this attempt, so that no other one is needed."""
        complete(file, header_bytes)
        with self._lock:
            label = label_of(file)
            shared = label.shared if label else None
            if shared is None or shared.attempt != self.attempt:
                return False
            for rank in set(self._files) - self.holds:
                self._drop(rank)
            return True

    def end(self, file: int) -> None:
        """No thread receives into `file` any more."""
        with self._lock:
            self._writing.discard(file)
            if self._ended:
                for rank in list(self._files):
                    self._drop(rank)

    def _drop(self, rank: int) -> None:
        files = self._files.pop(rank)
        for file in files:
            # A thread that still receives would write to a number that another file may get.
            if file in self._writing:
                self._files.setdefault(rank, []).append(file)
            else:
                os.ftruncate(file, 0)  # a rank may still have it open
                os.close(file)

    def labels(self) -> Iterator[tuple[int, Label]]:
        with self._lock:
            files = [file for files in self._files.values() for file in files]
        for file in files:
            if (label := label_of(file)) is not None:
                yield file, label

    @property
    def num_bytes(self) -> int:
        with self._lock:
            files = [file for files in self._files.values() for file in files]
            return sum(os.fstat(file).st_size for file in files)

    def close(self) -> None:
        """No thread uses a copy any more."""
        with self._lock:
            for files in self._files.values():
                for file in files:
                    os.close(file)
            self._files.clear()

"""Files that are only appended to, a line in one write: readers see whole lines."""

import contextlib
import logging
import os
from pathlib import Path

from orchestrator.contract.files.fence import GivenUp
from trainer.rank.fence import Admit, admit_all

LOG = logging.getLogger("trainer")

MOST_WAITING = 1 << 20
"""Bytes that are kept for a disk that may have room again: of metrics, some 1,500 steps."""


LONGEST = 1 << 16
"""Bytes of a line, by far."""


class LineFile:
    """Appends; what a crash left of a line is removed first: a line is read once it is whole."""

    def __init__(self, path: Path, admit: Admit = admit_all) -> None:
        self._admit = admit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._looked = False
        """Whether its end has been looked at: only who may write may cut."""
        self._waiting = b""
        """What is still to be written; it begins where a full disk cut a line off."""

    def append(self, line: bytes) -> None:
        """Write a line, its newline included. On a full disk, or one that does not say whether this
        attempt may still write, it waits for the next; training does not.

        Raises:
            GivenUp: a later attempt has begun; nothing was written.
        """
        if len(self._waiting) < MOST_WAITING:
            self._waiting += line
        else:
            LOG.warning("a line of %s is left out: too many wait", self._path)
        self._write()

    def _write(self) -> None:
        try:
            self._admit()
            if not self._looked:
                self._cut()
            while self._waiting:  # after a write that was cut short the next one says why
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
        except GivenUp:
            raise
        except OSError as exc:
            LOG.warning("a line of %s could not be written yet: %s", self._path, exc)

    def _cut(self) -> None:
        size = os.fstat(self._fd).st_size
        looked = min(size, LONGEST)
        end = os.pread(self._fd, looked, size - looked)
        if torn := len(end) - end.rfind(b"\n") - 1:
            os.ftruncate(self._fd, size - torn)
        self._looked = True

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            LOG.warning("%s may lack lines: %s", self._path, exc)

    def close(self) -> None:
        with contextlib.suppress(GivenUp):
            self._write()
        os.close(self._fd)

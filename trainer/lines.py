"""Files that are only appended to, a line in one write: readers see whole lines."""

import contextlib
import logging
import os
from pathlib import Path

from orchestrator.contract.fence import GivenUp
from trainer.fence import Admit, everybody

LOG = logging.getLogger("trainer")

MOST_WAITING = 1 << 20
"""Bytes that are kept for a disk that may have room again: of metrics, some 1,500 steps."""


class LineFile:
    """Appends; a line that a crash cut off is closed with a newline first."""

    def __init__(self, path: Path, admit: Admit = everybody) -> None:
        self._admit = admit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        torn = size and os.pread(self._fd, 1, size - 1) != b"\n"
        self._waiting = b"\n" if torn else b""
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
            while self._waiting:  # after a write that was cut short the next one says why
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
        except GivenUp:
            raise
        except OSError as exc:
            LOG.warning("a line of %s could not be written yet: %s", self._path, exc)

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

"""Files that are only appended to, a line in one write: readers see whole lines."""

import logging
import os
from pathlib import Path

from orchestrator.contract.fence import GivenUp
from trainer.fence import Admit, everybody

LOG = logging.getLogger("trainer")


class LineFile:
    """Appends; what a crash or a full disk cut off is closed with a newline first."""

    def __init__(self, path: Path, admit: Admit = everybody) -> None:
        self._admit = admit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"

    def append(self, line: bytes) -> None:
        """Write a line, its newline included; a full disk, or one that does not say whether this
        attempt may still write, costs lines, never the training.

        Raises:
            GivenUp: a later attempt has begun; nothing was written.
        """
        data = b"\n" + line if self._torn else line
        try:
            self._admit()
            written = os.write(self._fd, data)
        except GivenUp:
            raise
        except OSError as exc:
            LOG.warning("a line of %s could not be written: %s", self._path, exc)
        else:
            self._torn = written < len(data)

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            LOG.warning("%s may lack lines: %s", self._path, exc)

    def close(self) -> None:
        os.close(self._fd)

"""Append-only files. A line is never split over two writes, so readers never see half a line."""

import contextlib
import os
from pathlib import Path

from ndctl.rank.fence import Admit, GivenUp, admit_all

MAX_WAITING_BYTES = 1 << 20
"""Bytes kept in memory while the disk is full: about 1,500 steps of metrics."""


MAX_LINE_BYTES = 1 << 16
"""Much longer than any line."""


class LineFile:
    """Appends lines. Before the first one it removes half a line that a crash may have left."""

    def __init__(self, path: Path, admit: Admit = admit_all) -> None:
        self._admit = admit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._repaired = False
        """Half a line at the end was removed. Only an attempt that may write may do this."""
        self._waiting = b""
        """Bytes still to be written. They may start inside a line that a full disk cut off."""

    def append(self, *lines: bytes) -> None:
        """Write lines, each of which includes its newline. The fence is read once for all.

        If the disk is full or the fence file is unreadable, they are kept and written with the
        next ones, so that training continues.

        Raises:
            GivenUp: a later attempt has started; nothing was written.
        """
        for line in lines:
            if len(self._waiting) < MAX_WAITING_BYTES:
                self._waiting += line
            else:
                _warn("dropped a line of %s: too many lines are waiting", self._path)
        self._write()

    def _write(self) -> None:
        try:
            self._admit()
            if not self._repaired:
                self._remove_half_line()
            while self._waiting:  # a short write has no error; the next one raises the cause
                self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
        except GivenUp:
            raise
        except OSError as exc:
            _warn("failed to write a line of %s, will retry: %s", self._path, exc)

    def _remove_half_line(self) -> None:
        size = os.fstat(self._fd).st_size
        length = min(size, MAX_LINE_BYTES)
        end = os.pread(self._fd, length, size - length)
        if torn := len(end) - end.rfind(b"\n") - 1:
            os.ftruncate(self._fd, size - torn)
        self._repaired = True

    def sync(self) -> None:
        """Wait until all lines are on the disk, also those that could not be written before.

        Raises:
            GivenUp: a later attempt has started, and lines were still waiting.
        """
        if self._waiting:
            self._write()
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            _warn("failed to sync %s, which may lack lines: %s", self._path, exc)

    def close(self) -> None:
        with contextlib.suppress(GivenUp):
            self._write()
        os.close(self._fd)


def _warn(message: str, *values: object) -> None:
    import logging  # here, because its import takes as long as all others of the package

    logging.getLogger("ndctl").warning(message, *values)

"""Opens files for reading that another program, or another user, may have replaced.

Opening a FIFO waits until somebody writes to it, and a link to /dev/zero never ends. Only regular
files are read.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegular(OSError):
    """The path leads to something that is not a file with content."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, at once if it is not a regular file."""
    return os.fdopen(descriptor_of(path, os.O_RDONLY), "rb")


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def descriptor_of(path: Path, access: int) -> int:
    """A descriptor of a regular file. Raises as `open_regular`.

    Args:
        access: flags of `os.open`, without O_CREAT.
    """
    try:
        fd = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        # Without a reader or a driver the kernel refuses a socket, a FIFO or a device; and a folder
        # to a writer.
        if exc.errno in (errno.ENXIO, errno.EISDIR):
            raise _refusal(path, path.stat().st_mode) from exc
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    raise _refusal(path, mode)


def _refusal(path: Path, mode: int) -> NotRegular:
    kind = KINDS.get(stat.S_IFMT(mode), "something else")
    return NotRegular(errno.EINVAL, f"it is {kind}, not a file", str(path))

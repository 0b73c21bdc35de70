"""Files of one line per fact to which processes of many users and hosts append.

A writer shares the file's lock, so that a process with the exclusive lock can replace the file by a
shorter one. On NFS, of two appends from two hosts at the same moment one may be lost, so only facts
of which one more or less does not matter belong into such files.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from ndctl.rank.regular_file import descriptor_of


def append(path: Path, line: bytes) -> None:
    """Append a line, with its newline. Many processes may do so at once. The folder of the file is
    in the run root; the first writer creates both for all users of the run root.

    Raises OSError if the disk does not accept the line.
    """
    fd = _open_shared(path)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # an incomplete last line must not merge with this one
        if os.write(fd, line) != len(line):
            raise OSError(errno.ENOSPC, "only part of a line was written", str(path))
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_shared(path: Path) -> int:
    """A descriptor with the shared lock, so that no process replaces the file until it is
    closed."""
    while True:
        fd = _open(path)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_SH)
            if is_there(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def is_there(fd: int, path: Path) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    """A descriptor to append. The first writer creates the file for all users of the run root."""
    flags = os.O_RDWR | os.O_APPEND
    try:
        # Without O_CREAT, because Linux forbids it for a file of another user in a sticky folder.
        return descriptor_of(path, flags)
    except FileNotFoundError:
        folder = path.parent
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
        share(folder, folder.parent, 0o7777)
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o664)
    except FileExistsError:
        return descriptor_of(path, flags)
    share(path, folder.parent, 0o666)
    return fd


def share(path: Path, run_root: Path, most: int) -> None:
    """Give the file the group and permissions of the run root, whatever this user's umask."""
    like = run_root.stat()
    with contextlib.suppress(OSError):  # this user is not a member of the group
        os.chown(path, -1, like.st_gid)
    with contextlib.suppress(OSError):  # the file system has no permissions
        path.chmod(like.st_mode & most)

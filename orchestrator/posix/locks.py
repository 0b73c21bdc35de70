"""File locks (flock) that show which processes live: the kernel releases them with the process.

A leader holds an exclusive lock on its journal, an agent on the file of its host. The processes of
a host's ranks share a lock. To test a lock, a process takes it for a moment, so a process that
wants the lock must retry.

The locks work between hosts if the file system supports it. NFS does: its client requests a lock on
all bytes of the file from the server. That lock also belongs to the open file description, so
forked processes share it and closing another descriptor does not release it. But an exclusive lock
on NFS needs a descriptor open for writing, and a shared lock one open for reading.
"""

import errno
import fcntl
import os
from pathlib import Path

from ndctl.rank.regular_file import descriptor_of


def try_lock(fd: int) -> bool:
    """Take the exclusive lock if it is free. `fd` must be open for writing."""
    return _try(fd, fcntl.LOCK_EX)


def share(path: Path) -> int:
    """Share the lock until this process and all its children have ended. Returns the descriptor."""
    fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    os.set_inheritable(fd, True)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def is_held_alone(path: Path) -> bool:
    """Whether a process has the exclusive lock; False if there is no file."""
    return _refused(path, os.O_RDONLY, fcntl.LOCK_SH)


def is_free(path: Path) -> bool:
    """Whether no process has the lock, exclusive or shared."""
    return not _refused(path, os.O_RDWR, fcntl.LOCK_EX)


def _refused(path: Path, access: int, kind: int) -> bool:
    try:
        fd = descriptor_of(path, access)
    except FileNotFoundError:
        return False
    except OSError as exc:
        if exc.errno != errno.EROFS:
            raise
        fd = descriptor_of(path, os.O_RDONLY)  # the storage became read-only under a job
    try:
        return not _try(fd, kind)
    finally:
        os.close(fd)


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

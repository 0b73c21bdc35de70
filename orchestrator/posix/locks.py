"""File locks (flock) that say who lives: the kernel lets go of them with the last process.

A leader holds its journal alone, an agent the file of its host; the processes of a host's ranks
share one. To look, a lock is taken for a moment, so whoever wants one has to be patient.

They hold between hosts where the file system says so: on NFS, whose client asks the server for a
lock on all bytes of the file instead. That belongs to the open file description as well, so forked
processes share it and no other descriptor's end lets go of it; but it takes a descriptor that may
write to keep everybody out, and one that may read to share.
"""

import fcntl
import os
from pathlib import Path


def try_lock(fd: int) -> bool:
    """Take the lock for this process alone, if nobody has it; `fd` is open for writing."""
    return _try(fd, fcntl.LOCK_EX)


def share(path: Path) -> int:
    """Share the lock until this process and all its children have ended; the descriptor."""
    fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    os.set_inheritable(fd, True)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def is_held_alone(path: Path) -> bool:
    """Whether some process keeps everybody else out; False where there is no file."""
    return _refused(path, os.O_RDONLY, fcntl.LOCK_SH)


def is_free(path: Path) -> bool:
    """Whether no process has it, alone or shared."""
    return not _refused(path, os.O_RDWR, fcntl.LOCK_EX)


def _refused(path: Path, access: int, kind: int) -> bool:
    try:
        fd = os.open(path, access)
    except FileNotFoundError:
        return False
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

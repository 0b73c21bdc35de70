"""File locks (flock) that say who lives: the kernel lets go of them with the last process.

A leader holds its journal alone, an agent the file of its host; the processes of a host's ranks
share one. To look, a lock is taken for a moment, so whoever wants one has to be patient.
"""

import fcntl
import os
from pathlib import Path


def try_lock(fd: int) -> bool:
    """Take the lock for this process alone, if nobody has it."""
    return _try(fd, fcntl.LOCK_EX)


def is_held_alone(path: Path) -> bool:
    """Whether some process keeps everybody else out; False where there is no file."""
    return _refused(path, fcntl.LOCK_SH)


def is_free(path: Path) -> bool:
    """Whether no process has it, alone or shared."""
    return not _refused(path, fcntl.LOCK_EX)


def _refused(path: Path, kind: int) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
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

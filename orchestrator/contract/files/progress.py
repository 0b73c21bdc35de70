"""Shared memory in which a rank stores its step, so that its watcher knows it after any end.

Heartbeats may be lost, but whether the last step was done decides whether a job has succeeded. So
a rank also writes each step into memory that it shares with its watcher. That needs no message, no
file and no disk space.
"""

import os
import struct
from pathlib import Path

NAME = "ndctl-steps"
STEPS = struct.Struct("<q")


def shared() -> int:
    """Descriptor of new shared memory. Child processes inherit it."""
    return os.memfd_create(NAME, 0)


def is_shared(fd: int) -> bool:
    """Whether `fd` is such memory. A program that the rank started has the rank's environment
    variables, but its descriptor of that number may be another file."""
    try:
        return Path(f"/proc/self/fd/{fd}").readlink().name.startswith(f"memfd:{NAME}")
    except OSError:
        return False


def write(fd: int, step: int) -> None:
    os.pwrite(fd, STEPS.pack(step), 0)


def read(fd: int) -> int:
    """Steps done; 0 if none was written."""
    said = os.pread(fd, STEPS.size, 0)
    step: int = STEPS.unpack(said)[0] if said else 0
    return step

"""Syncs files to the disk, so that they survive a crash of the machine."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk.

    Raises:
        OSError: the sync failed, or an earlier write that returned without error did.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

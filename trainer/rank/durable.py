"""What has been written stays written when the machine goes down."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk.

    Raises:
        OSError: also where a write that seemed to have worked did not, for the disk is full.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

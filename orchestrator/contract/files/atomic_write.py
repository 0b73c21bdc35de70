"""Atomic writes of small files that others may read at any moment; why a write failed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EISDIR, ENOSPC
from pathlib import Path

UNFINISHED = ".part"
"""Ending of the name of a file that is being written, or whose writer was killed."""

NO_SPACE = (ENOSPC, EDQUOT)
"""Error numbers of a full disk or quota."""


def why_not_written(error: OSError, path: Path) -> str:
    """The cause and, if the disk or the quota is full, the free space of the disk of `path`."""
    cause = error.strerror or str(error)
    return f"{cause} ({free_space(path)})" if error.errno in NO_SPACE else cause


def free_space(path: Path) -> str:
    """The free space of the disk of `path`, which need not exist."""
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    usage = shutil.disk_usage(existing)
    return f"{usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB free"


def write_whole(path: Path, data: bytes, durable: bool = False) -> None:
    """Replace `path`; with `durable` the data is on disk when this returns.

    Raises OSError. The old file is then unchanged and the new one removed.
    """
    with written_beside(path, data, durable) as fresh:
        fresh.replace(path)


@contextmanager
def written_beside(path: Path, data: bytes, durable: bool = False) -> Iterator[Path]:
    """A complete new file beside `path`, for callers that check something before they move it to
    `path`. It is removed at the end unless it was moved. Its name is unique to this process on all
    hosts."""
    if not path.name:
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    fresh = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}{UNFINISHED}")
    try:
        fresh.unlink(missing_ok=True)  # left by a killed process that had the same process id
        with fresh.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)

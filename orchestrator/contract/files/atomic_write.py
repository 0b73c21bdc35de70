"""Atomic writes of small files that others may read at any moment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".part"
"""Ending of the name of a file that is being written, or whose writer was killed."""


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

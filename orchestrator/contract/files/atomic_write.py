"""Small files that others read at any moment: they are there whole, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".part"
"""How the names of those end that are still written, or whose writer was killed."""


def write_whole(path: Path, data: bytes, durable: bool = False) -> None:
    """In the place of what is there; `durable`: on disk when this returns.

    Raises OSError, with the former file as it was and nothing beside it.
    """
    with written_beside(path, data, durable) as fresh:
        fresh.replace(path)


@contextmanager
def written_beside(path: Path, data: bytes, durable: bool = False) -> Iterator[Path]:
    """A file for who has still to ask something before it takes the place of `path`. Where it did
    not, it is gone afterwards. Its name is this process's alone, on all hosts."""
    fresh = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}{UNFINISHED}")
    try:
        fresh.unlink(missing_ok=True)  # of a process of that number that was killed
        with fresh.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)

"""The measured speeds of earlier jobs, in one file of the run root.

The leader of each job appends a line when the job ends. On Kubernetes the run root of the pods is
not that of the user's machine, so there `ndctl status` and the like append the same line when their
copy of a job has ended. A line that cannot be read is ignored. Without a readable file there is no
correction; without a writable one nothing is learned, and nothing else changes.
"""

import contextlib
import fcntl
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ndctl.rank.regular_file import open_regular
from orchestrator.contract.files.atomic_write import written_beside
from orchestrator.contract.files.shared_lines import append, is_there, share
from orchestrator.plan.history.record import SpeedRecord, is_sound

log = logging.getLogger(__name__)

FOLDER = ".history"
READ_BYTES = 1 << 20
"""The end of the file that is read, some hundred jobs."""
LARGE_BYTES = 4 * READ_BYTES
"""A larger file is cut to its last `READ_BYTES` by the next writer."""
MOST_LINE = 16 << 10


def path_of(run_root: Path) -> Path:
    return run_root / FOLDER / "speeds.jsonl"


def remember(path: Path, record: SpeedRecord) -> None:
    """Append a record, unless the file has it. Many processes may do so at once. Raises OSError."""
    if any(one.identity == record.identity for one in recall(path)):
        return
    append(path, msgspec.json.encode(record) + b"\n")
    if path.stat().st_size > LARGE_BYTES:
        _shorten(path)


def recall(path: Path) -> tuple[SpeedRecord, ...]:
    """The records at the end of the file, the newest last."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - READ_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return ()
    except OSError as exc:
        _warn_once(f"planning without earlier jobs, failed to read their speeds: {exc}")
        return ()
    return tuple(_records(lines if size <= READ_BYTES else lines[1:]))


def _records(lines: list[bytes]) -> Iterator[SpeedRecord]:
    # The last piece is empty, or a line that is being written.
    for line in lines[:-1]:
        if len(line) <= MOST_LINE:
            # Lines of other versions, torn lines and foreign text.
            with contextlib.suppress(ValueError, RecursionError):
                record = _decoder().decode(line)
                if is_sound(record):
                    yield record


@functools.cache
def _decoder() -> "msgspec.json.Decoder[SpeedRecord]":
    return msgspec.json.Decoder(SpeedRecord)


@functools.cache
def _warn_once(said: str) -> None:
    log.warning("%s", said)


def _shorten(path: Path) -> None:
    """Keep the end of the file. Another process that appends meanwhile prevents it, and the next
    writer tries again."""
    with contextlib.suppress(BlockingIOError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_there(file.fileno(), path):
            return
        file.seek(-READ_BYTES, os.SEEK_END)
        kept = file.read().partition(b"\n")[2]
        with written_beside(path, kept, durable=True) as fresh:
            share(fresh, path.parent.parent, 0o666)
            fresh.replace(path)

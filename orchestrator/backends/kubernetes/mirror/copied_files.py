"""Reads and writes the copied journal and metrics of a mirror."""

import contextlib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.actions import StartAttempt, StopAttempt
from orchestrator.contract.messages.events import JobSubmitted, StepReached
from orchestrator.contract.read_json import read_json
from orchestrator.journal.journal import Place, mark, position_after


def is_stopping(journal: bytes, *, before: bool) -> bool:
    """Whether the last order to ranks in these lines is to stop; `before` if there is none."""
    stop, start = journal.rfind(mark(StopAttempt)), journal.rfind(mark(StartAttempt))
    return before if stop == start else stop > start


def has_trained(run_dir: RunDir) -> bool:
    """Whether a step of the newest launch is in the journal."""
    path = run_dir.journal
    begun = position_after(path, JobSubmitted, Place(offset=path.stat().st_size))
    with path.open("rb") as file:
        file.seek(begun.offset)
        return mark(StepReached) in file.read()


def put(path: Path, offset: int, data: bytes) -> None:
    """Write `data` at `offset`, and truncate the file after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        stack.callback(os.close, fd)
        os.ftruncate(fd, offset)
        os.pwrite(fd, data, offset)


def with_last_metrics(known: bytes, told: bytes) -> bytes:
    """The copied metrics, followed by the last lines, which a pod printed below the first line.
    Most of these were copied while the job ran, with those between."""
    first, _, last = told.partition(b"\n")
    begins = known.find(b"\n" + last.partition(b"\n")[0] + b"\n") + 1 if last else 0
    if begins:
        return known[:begins] + last
    # Lines between the copied and the printed ones are missing, or nothing was copied yet, or it
    # is of another run.
    return known + last if known.startswith(first + b"\n") else told or known


def end_of_line(path: Path, number: int) -> int | None:
    """Offset of the end of line `number` (from 1) of a journal; None if it has fewer lines."""
    if not number:
        return 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = sum(map(len, islice(file, number - 1)))
        last = file.readline()
        return size + len(last) if last.endswith(b"\n") else None
    return None


def first_seq(journal: bytes) -> int:
    """The sequence number of the first line; 0 if the bytes do not begin with a journal line."""
    try:
        return int(read_json(journal.partition(b"\n")[0])["seq"])
    except (ValueError, KeyError, TypeError):
        return 0


def marked(lines: Iterable[bytes], mark: str) -> bytes:
    found = [line for line in lines if line.startswith(mark.encode())]
    return b"".join(line.removeprefix(mark.encode()) + b"\n" for line in found)

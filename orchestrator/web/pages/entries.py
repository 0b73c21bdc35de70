"""The newest lines of a journal, and those around an incident, read within a limit.

`JobReader` has the state that follows from all lines. Pages show some lines as text too, without
late heartbeats.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from ndctl.rank.regular_file import open_regular
from orchestrator.contract.codec import Invalid
from orchestrator.dashboard.event_text import event_time
from orchestrator.dashboard.follow.events import is_noise
from orchestrator.dashboard.metrics import lines_backwards
from orchestrator.job.incident import Incident
from orchestrator.journal.journal import Entry, from_line

MOST_BYTES = 8 << 20
"""Of a journal. It has the lines of some days; the rest takes `ndctl events`."""
PIECE = 1 << 16
"""Bytes that are read from their start instead of being divided further."""
BEFORE_S, AFTER_S = 60.0, 30.0
"""Time around an incident whose lines are shown."""


class Found(Struct, frozen=True, kw_only=True):
    entries: tuple[Entry, ...]
    """In the order of the journal."""
    complete: bool
    """False: there may be more, further back than the limit."""


def newest(journal: Path, most: int, lines: int | None = None) -> Found:
    """The last entries. Raises OSError.

    Args:
        lines: only entries among so many lines of the journal; None: all. What was written since a
            state was read would contradict it.
    """
    found = list[Entry]()
    for entry in _backwards(journal):
        if entry is None or len(found) == most:
            return Found(entries=tuple(reversed(found)), complete=False)
        if lines is None or entry.seq <= lines:
            found.append(entry)
    return Found(entries=tuple(reversed(found)), complete=True)


def around(journal: Path, incident: Incident, most: int) -> Found:
    """From shortly before an incident until training goes on. Raises OSError.

    Args:
        most: lines; the first ones are kept, because they have the cause.
    """
    first, last = incident.at - BEFORE_S, float("inf")
    if incident.resumed_after_s is not None:
        last = incident.at + incident.resumed_after_s + AFTER_S
    found = list[Entry]()
    # Times of the journal may go back a little, when a clock was set or a report was late.
    for entry in _forwards(journal, first - AFTER_S):
        if entry is None or len(found) == most:
            return Found(entries=tuple(found), complete=False)
        if entry.event.at > last + AFTER_S:
            break
        if first <= event_time(entry.event) <= last and not is_noise(entry):
            found.append(entry)
    return Found(entries=tuple(found), complete=True)


def _forwards(journal: Path, at: float) -> Iterator[Entry | None]:
    """Entries from the time `at` on; None at the end if the limit was reached."""
    with open_regular(journal) as file:
        file.seek(_offset_of(file, at))
        left = MOST_BYTES
        for line in file:
            left -= len(line)
            if left < 0:
                yield None
                return
            if line.endswith(b"\n") and (entry := _entry(line)) is not None:
                yield entry


def _offset_of(file: BinaryIO, at: float) -> int:
    """A place between two lines, before which nothing happened at or after `at`, by bisection."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > PIECE:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        begins, entry = file.tell(), None
        while entry is None and file.tell() < high:
            begins = file.tell()
            entry = _entry(file.readline())
        if entry is None or entry.event.at >= at:
            high = middle
        else:
            low = begins
    return low


def _backwards(journal: Path) -> Iterator[Entry | None]:
    """The last entry first; None at the end if the limit was reached."""
    left = MOST_BYTES
    for line in lines_backwards(journal):
        left -= len(line) + 1
        if left < 0:
            yield None
            return
        if (entry := _entry(line)) is not None and not is_noise(entry):
            yield entry


def _entry(line: bytes) -> Entry | None:
    """None if the line is damaged, which the reader of the job reports."""
    try:
        return from_line(line)
    except (ValueError, KeyError, TypeError, Invalid):
        return None

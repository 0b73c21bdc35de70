"""The newest lines of a journal, and those around an incident, read backwards within a limit.

`JobReader` has the state that follows from all lines. Pages show some lines as text too, without
late heartbeats.
"""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.codec import Invalid
from orchestrator.dashboard.event_text import event_time
from orchestrator.dashboard.follow.events import is_noise
from orchestrator.dashboard.metrics import lines_backwards
from orchestrator.job.incident import Incident
from orchestrator.journal.journal import Entry, from_line

MOST_BYTES = 8 << 20
"""Of the end of a journal. It has the lines of some days; the rest takes `ndctl events`."""
BEFORE_S, AFTER_S = 60.0, 30.0
"""Time around an incident whose lines are shown."""


class Found(Struct, frozen=True, kw_only=True):
    entries: tuple[Entry, ...]
    """In the order of the journal."""
    complete: bool
    """False: there may be more, further back than the limit."""


def newest(journal: Path, most: int) -> Found:
    """The last entries. Raises OSError."""
    found = list[Entry]()
    for entry in _backwards(journal):
        if entry is None or len(found) == most:
            return Found(entries=tuple(reversed(found)), complete=False)
        found.append(entry)
    return Found(entries=tuple(reversed(found)), complete=True)


def around(journal: Path, incident: Incident, most: int) -> Found:
    """From shortly before an incident until training goes on. Raises OSError.

    Args:
        most: lines; the first ones are kept, because they have the cause.
    """
    first, last = incident.at - BEFORE_S, float("inf")
    if incident.recovered_after_s is not None:
        last = incident.at + incident.recovered_after_s + AFTER_S
    found, complete = list[Entry](), True
    for entry in _backwards(journal):
        if entry is None:
            complete = False
            break
        # Times of the journal may go back a little, when a clock was set or a report was late.
        if entry.event.at < first - AFTER_S:
            break
        if first <= event_time(entry.event) <= last:
            found.append(entry)
    found.reverse()
    return Found(entries=tuple(found[:most]), complete=complete and len(found) <= most)


def _backwards(journal: Path) -> Iterator[Entry | None]:
    """The last entry first; None at the end if the limit was reached."""
    left = MOST_BYTES
    for line in lines_backwards(journal):
        left -= len(line) + 1
        if left < 0:
            yield None
            return
        try:
            entry = from_line(line)
        except (ValueError, KeyError, TypeError, Invalid):
            continue  # damaged: the reader of the job says so
        if not is_noise(entry):
            yield entry

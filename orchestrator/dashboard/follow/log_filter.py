"""Which lines of logs a person wants: since a time, and with a pattern."""

from collections.abc import Iterable, Iterator
from datetime import tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from orchestrator.contract.times import short_date_time
from orchestrator.dashboard.follow.logs import LogLine, stamp_of

if TYPE_CHECKING:
    import re2


class LogFilter(Struct, frozen=True, kw_only=True):
    now: float = 0.0
    since: float | None = None
    """Unix time, less than a year ago, because lines have no year. A line without a time belongs to
    the line before it in its file. A file without any time counts from its last change."""
    pattern: str = ""
    """A regular expression of RE2, case-insensitive; empty: every line."""
    zone: tzinfo | None = None
    """Time zone of the logs; None: of this machine. Logs do not name theirs."""


def wanted(lines: Iterable[LogLine], given: LogFilter) -> Iterator[LogLine]:
    if given.since is not None:
        lines = _since(lines, given.since, given)
    if given.pattern:
        lines = _matching(lines, given.pattern)
    yield from lines


def _since(lines: Iterable[LogLine], since: float, given: LogFilter) -> Iterator[LogLine]:
    first, last = (
        short_date_time(since, given.zone),
        short_date_time(given.now + 86_400, given.zone),
    )
    stamps: dict[Path, str] = {}
    for line in lines:
        path = line.file.path
        stamp = stamp_of(line.text) or stamps.get(path, "")
        stamps[path] = stamp
        # A stamp after tomorrow is of last year. Around New Year `last` is before `first`.
        recent = first <= stamp <= last if first <= last else stamp >= first or stamp <= last
        if recent if stamp else _changed_since(path, since):
            yield line


def _changed_since(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime >= since
    except OSError:
        return False


def _matching(lines: Iterable[LogLine], pattern: str) -> Iterator[LogLine]:
    from orchestrator.diagnosis.logs.patterns import compiled

    search: re2._Regexp[str] = compiled((pattern,))
    for line in lines:
        if search.search(line.text):
            yield line

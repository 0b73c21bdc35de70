"""The newest lines of logs and of the journal, in bounded memory, for a screen to follow."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.follow.events import event_lines
from orchestrator.dashboard.follow.logs import (
    FollowedLog,
    LogLine,
    add_new_files,
    agent_files,
    attempts,
    log_files,
    stamp_of,
)
from orchestrator.journal.journal import Tail

MOST_LINES = 5000
FIRST_LINES = 500
"""Lines of each log that are read first."""
RESCAN_TURNS = 8
"""New log files are searched for once in so many looks."""


class NewestLines(Struct, frozen=True, kw_only=True):
    lines: Sequence[str]
    dropped: int
    """Earlier lines that were read and not kept."""


class _Kept:
    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=MOST_LINES)
        self.seen = 0

    def add(self, lines: Iterable[str]) -> NewestLines:
        for line in lines:
            self.lines.append(line)
            self.seen += 1
        return NewestLines(lines=tuple(self.lines), dropped=self.seen - len(self.lines))


class LogTail:
    """The logs of one rank, of all ranks of a host, or of all hosts; of agents before the first
    attempt."""

    def __init__(self, run_dir: RunDir, host: str, rank: int | None) -> None:
        self.run_dir, self.host, self.rank = run_dir, host, rank
        self.followed: dict[Path, FollowedLog] = {}
        self.kept, self.turn = _Kept(), 0

    def __call__(self) -> NewestLines:
        """Raises OSError."""
        if self.turn % RESCAN_TURNS == 0:
            self._rescan()
        self.turn += 1
        batch = [line for log in self.followed.values() for line in _stamped(log.more())]
        batch.sort(key=lambda stamped: stamped[0])  # stable: a traceback stays in one piece
        alone = self.rank is not None
        return self.kept.add(line.text if alone else str(line) for _, line in batch)

    def _rescan(self) -> None:
        newest = max(attempts(self.run_dir), default=0)
        hosts = (self.host,) if self.host else ()
        # A rank of the next attempt may be on another host.
        files = log_files(self.run_dir, newest, self.rank, () if self.rank is not None else hosts)
        if not newest:
            files = [one for one in agent_files(self.run_dir) if one.host in (hosts or (one.host,))]
        add_new_files(self.followed, files, newest, FIRST_LINES)


def _stamped(lines: Iterable[LogLine]) -> Iterator[tuple[str, LogLine]]:
    stamp = ""
    for line in lines:
        stamp = max(stamp, stamp_of(line.text))
        yield stamp, line


class EventTail:
    """The lines of `ndctl events`."""

    def __init__(self, run_dir: RunDir) -> None:
        self.tail, self.kept = Tail(run_dir.journal), _Kept()

    def __call__(self) -> NewestLines:
        """Raises OSError, and JobError if the journal is damaged."""
        before = self.tail.lines
        # Only the newest entries become text: a journal of weeks needs gigabytes of memory.
        entries = deque(self.tail.each(), maxlen=MOST_LINES)
        self.kept.seen += self.tail.lines - before - len(entries)
        return self.kept.add(event_lines(entries, None))

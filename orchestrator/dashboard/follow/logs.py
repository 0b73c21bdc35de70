"""The logs of all ranks as one stream, each line with where it comes from.

Order: lines that begin with a date and a time (ISO, or torchrun's `W1120 18:22:33.123`) are merged
by it, and a line without one stays with the line before it in its file, so that a traceback is not
torn apart. Files without any times come whole and first, in rank order, torchrun's last. Following,
lines come as they are written, whole lines only.
"""

import contextlib
import heapq
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.seams import Clock

POLL_S = 0.25
RESCAN_TURNS = 4
"""Looks at the files between two looks for new files."""
_CHUNK = 64 * 1024
STAMP = re.compile(
    r"\W?(?:\d{4}-(?P<iso>\d\d-\d\d)[T ](?P<iso_time>\d\d:\d\d:\d\d(?:[.,]\d+)?)"
    r"|[IWEFDC](?P<glog>\d{4}) (?P<glog_time>\d\d:\d\d:\d\d(?:\.\d+)?))"
)
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
"""A rank keeps its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    path: Path
    host: str
    rank: int | None
    """None for the log of torchrun itself, or of the agent."""
    program: str = "torchrun"

    @property
    def label(self) -> str:
        return (
            f"{self.host} {self.program}" if self.rank is None else f"{self.host} rank {self.rank}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    file: LogFile
    text: str

    def __str__(self) -> str:
        return f"[{self.file.label}] {self.text}"


def colour_of(file: LogFile) -> str | None:
    """Of a rank's lines on a terminal; None for those of torchrun or an agent."""
    return None if file.rank is None else COLOURS[file.rank % len(COLOURS)]


def attempts(run_dir: RunDir) -> list[int]:
    """Those that have logs, in order."""
    found = (
        re.fullmatch(r"attempt-(\d+)", folder.name) for folder in run_dir.logs.glob("attempt-*")
    )
    return sorted(int(match[1]) for match in found if match)


def log_files(run_dir: RunDir, attempt: int, rank: int | None = None) -> list[LogFile]:
    """By rank, torchrun's after them; with `rank`, that one's alone."""
    files = []
    for path in (run_dir.logs / f"attempt-{attempt}").glob("*/*.log"):
        match = re.fullmatch(r"rank-(\d+)", path.stem)
        if match or path.stem == "torchrun":
            number = int(match[1]) if match else None
            files.append(LogFile(path=path, host=path.parent.name, rank=number))
    if rank is not None:
        files = [file for file in files if file.rank == rank]
    return sorted(files, key=lambda file: (file.rank is None, file.rank or 0, file.host))


def agent_files(run_dir: RunDir) -> list[LogFile]:
    """What the hosts' agents said themselves, of all attempts and before the first."""
    found = [(re.fullmatch(r"agent-(.+)", path.stem), path) for path in run_dir.logs.glob("*.log")]
    files = [
        LogFile(path=path, host=match[1], rank=None, program="agent")
        for match, path in found
        if match
    ]
    return sorted(files, key=lambda file: file.host)


def read_logs(files: Iterable[LogFile], tail: int | None = None) -> Iterator[LogLine]:
    """All lines there are; with `tail`, the last ones of each file, read from its end."""
    streams = [_stamped(file, index, tail) for index, file in enumerate(files)]
    for _, line in heapq.merge(*streams, key=lambda stamped: stamped[0]):
        yield line


Key = tuple[str, int]


def _stamped(file: LogFile, index: int, tail: int | None) -> Iterator[tuple[Key, LogLine]]:
    stamp = ""
    for text in _lines(file.path, tail):
        stamp = max(stamp, stamp_of(text))
        yield (stamp, index), LogLine(file=file, text=text)


def stamp_of(text: str) -> str:
    """Month, day and time as a string that sorts; empty when the line does not begin with them."""
    match = STAMP.match(text)
    if match is None:
        return ""
    day = match["iso"] or f"{match['glog'][:2]}-{match['glog'][2:]}"
    return f"{day} {match['iso_time'] or match['glog_time']}".replace(",", ".")


def _lines(path: Path, tail: int | None) -> Iterator[str]:
    """An unfinished last line is what a dying rank said last: it counts."""
    start = 0 if tail is None else start_of_tail(path, tail)
    try:
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                yield _text(line)
    except FileNotFoundError:
        return


def start_of_tail(path: Path, lines: int) -> int:
    """Where the last `lines` lines of a file begin, found from its end."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = place = file.seek(0, os.SEEK_END)
        wanted = lines
        while place > 0:
            start = max(0, place - _CHUNK)
            file.seek(start)
            chunk = file.read(place - start)
            if place == size and chunk.endswith(b"\n"):
                wanted += 1
            if chunk.count(b"\n") >= wanted:
                return start + _nth_end_from_last(chunk, wanted)
            wanted -= chunk.count(b"\n")
            place = start
    return 0


def _nth_end_from_last(chunk: bytes, number: int) -> int:
    """Behind the `number`-th line end of `chunk`, counted from its last."""
    place = len(chunk)
    for _ in range(number):
        place = chunk.rindex(b"\n", 0, place)
    return place + 1 if number else len(chunk)


def _text(line: bytes) -> str:
    return line.rstrip(b"\r\n").decode(errors="replace")


@dataclass(slots=True)
class _Growing:
    """A log that is being written."""

    file: LogFile
    attempt: int
    offset: int

    def more(self, last: bool = False) -> Iterator[LogLine]:
        """Whole lines since the last look; with `last`, an unfinished one too."""
        try:
            with self.file.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size <= self.offset:
                    return
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data if last else data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.removesuffix(b"\n").split(b"\n") if whole else []:
            yield LogLine(file=self.file, text=_text(line))


def follow_logs(
    run_dir: RunDir,
    *,
    clock: Clock,
    ended: Callable[[], bool],
    rank: int | None = None,
    attempt: int | None = None,
    tail: int | None = None,
) -> Iterator[LogLine]:
    """Lines as they are written, until `ended()`; without `attempt`, of each attempt as it starts.

    `tail` is for what is there already: so many last lines of each file, all of them without it.
    """
    growing: dict[Path, _Growing] = {}
    newest = attempt or max(attempts(run_dir), default=1)
    for turn in itertools.count():
        over = ended()  # asked before the last look, so that nothing is missed
        if over or turn % RESCAN_TURNS == 0:
            later = [] if attempt else [n for n in attempts(run_dir) if n > newest]
            skip = tail if turn == 0 else None
            for number in (newest, *later):
                _take_up(growing, log_files(run_dir, number, rank), number, skip)
            newest = max([newest, *later])
        for log in list(growing.values()):
            yield from log.more(last=over or log.attempt < newest)
        if over:
            return
        growing = {path: log for path, log in growing.items() if log.attempt >= newest}
        clock.sleep(POLL_S)


def _take_up(
    growing: dict[Path, _Growing], files: Iterable[LogFile], attempt: int, tail: int | None
) -> None:
    for file in files:
        if file.path not in growing:
            first = 0 if tail is None else start_of_tail(file.path, tail)
            growing[file.path] = _Growing(file, attempt, first)

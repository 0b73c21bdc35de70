"""Merges the logs of all ranks into one stream; each line is labelled with host and rank.

Lines that start with a date and time (ISO, or torchrun's `W1120 18:22:33.123`) are sorted by it. A
line without a time stays behind the preceding line of its file, so that a traceback stays in one
piece. Files without any time come first and whole, in rank order, then torchrun's. When following,
lines are printed in the order in which they are written, complete lines only.
"""

import contextlib
import heapq
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from ndctl.rank.regular_file import open_regular
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.seams import Clock

POLL_S = 0.25
RESCAN_TURNS = 4
"""New log files are searched for once in so many polls."""
_CHUNK = 64 * 1024
STAMP = re.compile(
    r"\W?(?:\d{4}-(?P<iso>\d\d-\d\d)[T ](?P<iso_time>\d\d:\d\d:\d\d(?:[.,]\d+)?)"
    r"|[IWEFDC](?P<glog>\d{4}) (?P<glog_time>\d\d:\d\d:\d\d(?:\.\d+)?))"
)
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")


class LogFile(Struct, frozen=True, kw_only=True):
    path: Path
    host: str
    rank: int | None
    """None for a log of torchrun or of an agent."""
    program: str = "torchrun"

    @property
    def label(self) -> str:
        return (
            f"{self.host} {self.program}" if self.rank is None else f"{self.host} rank {self.rank}"
        )


class LogLine(Struct, frozen=True, kw_only=True):
    file: LogFile
    text: str

    def __str__(self) -> str:
        return f"[{self.file.label}] {self.text}"


def colour_of(file: LogFile) -> str | None:
    """The terminal colour of a rank's lines; None for torchrun and agents."""
    return None if file.rank is None else COLOURS[file.rank % len(COLOURS)]


def attempts(run_dir: RunDir) -> list[int]:
    """Numbers of the attempts that have logs, ascending."""
    found = (
        re.fullmatch(r"attempt-(\d+)", folder.name) for folder in run_dir.logs.glob("attempt-*")
    )
    return sorted(int(match[1]) for match in found if match)


def log_files(
    run_dir: RunDir, attempt: int, rank: int | None = None, hosts: Collection[str] = ()
) -> list[LogFile]:
    """Log files in rank order, then torchrun's. With `rank`: only the file of that rank. With
    `hosts`: only files of these hosts."""
    files = []
    for path in (run_dir.logs / f"attempt-{attempt}").glob("*/*.log"):
        match = re.fullmatch(r"rank-(\d+)", path.stem)
        if match or path.stem == "torchrun":
            number = int(match[1]) if match else None
            files.append(LogFile(path=path, host=path.parent.name, rank=number))
    if rank is not None:
        files = [file for file in files if file.rank == rank]
    if hosts:
        files = [file for file in files if file.host in hosts]
    return sorted(files, key=lambda file: (file.rank is None, file.rank or 0, file.host))


def are_empty(files: Iterable[Path]) -> bool:
    """Whether nothing was printed. False without a file: the log may be on another machine."""
    sizes = []
    for path in files:
        # ValueError: a damaged journal may name a host with a null byte.
        with contextlib.suppress(OSError, ValueError):
            sizes.append(path.stat().st_size)
    return bool(sizes) and not any(sizes)


def silence_text(
    run_dir: RunDir, rank: int | None, attempt: int | None, hosts: Collection[str] = ()
) -> str:
    """`rank 1 printed nothing in attempt 6 (PATH)`; empty if there is a line, or no log."""
    number = attempt or max(attempts(run_dir), default=1)
    files = log_files(run_dir, number, rank, hosts)
    if not are_empty([file.path for file in files]):
        return ""
    who = f"rank {rank}" if rank is not None else "no rank"
    what = "printed nothing" if rank is not None else "printed anything"
    place = files[0].path if len(files) == 1 else run_dir.logs / f"attempt-{number}"
    return f"{who} {what} in attempt {number} ({place})"


def agent_files(run_dir: RunDir) -> list[LogFile]:
    """Logs of the agents, which cover all attempts and the time before the first."""
    found = [(re.fullmatch(r"agent-(.+)", path.stem), path) for path in run_dir.logs.glob("*.log")]
    files = [
        LogFile(path=path, host=match[1], rank=None, program="agent")
        for match, path in found
        if match
    ]
    return sorted(files, key=lambda file: file.host)


def read_logs(files: Iterable[LogFile], tail: int | None = None) -> Iterator[LogLine]:
    """All lines; with `tail`, only so many last lines of each file."""
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
    """Month, day and time as a sortable string; empty if the line does not start with a time."""
    match = STAMP.match(text)
    if match is None:
        return ""
    day = match["iso"] or f"{match['glog'][:2]}-{match['glog'][2:]}"
    return f"{day} {match['iso_time'] or match['glog_time']}".replace(",", ".")


def _lines(path: Path, tail: int | None) -> Iterator[str]:
    """All lines, including an incomplete last one: it may be the last output of a dying rank."""
    start = 0 if tail is None else start_of_tail(path, tail)
    try:
        with open_regular(path) as file:
            file.seek(start)
            for line in file:
                yield _text(line)
    except FileNotFoundError:
        return


def start_of_tail(path: Path, lines: int) -> int:
    """Byte offset of the last `lines` lines of a file; reads backwards from its end."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        size = place = file.seek(0, os.SEEK_END)
        lines_needed = lines
        while place > 0:
            start = max(0, place - _CHUNK)
            file.seek(start)
            chunk = file.read(place - start)
            if place == size and chunk.endswith(b"\n"):
                lines_needed += 1
            if chunk.count(b"\n") >= lines_needed:
                return start + _nth_end_from_last(chunk, lines_needed)
            lines_needed -= chunk.count(b"\n")
            place = start
    return 0


def _nth_end_from_last(chunk: bytes, number: int) -> int:
    """Offset behind the `number`-th newline of `chunk`, counted from the end."""
    place = len(chunk)
    for _ in range(number):
        place = chunk.rindex(b"\n", 0, place)
    return place + 1 if number else len(chunk)


def _text(line: bytes) -> str:
    return line.rstrip(b"\r\n").decode(errors="replace")


@dataclass(slots=True)
class FollowedLog:
    file: LogFile
    attempt: int
    offset: int

    def more(self, last: bool = False) -> Iterator[LogLine]:
        """Complete lines since the last call; with `last`, also an incomplete last line."""
        try:
            with open_regular(self.file.path) as file:
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


def follow_logs(  # noqa: PLR0913 - one argument per option of `ndctl logs`
    run_dir: RunDir,
    *,
    clock: Clock,
    ended: Callable[[], bool],
    rank: int | None = None,
    attempt: int | None = None,
    tail: int | None = None,
    hosts: Collection[str] = (),
) -> Iterator[LogLine]:
    """Yields new lines until `ended()` is true.

    Args:
        attempt: follow only this attempt. None: follow each attempt as it starts.
        tail: print so many last lines of each existing file first. None: print all of it.
    """
    growing: dict[Path, FollowedLog] = {}
    newest = attempt or max(attempts(run_dir), default=1)
    for turn in itertools.count():
        over = ended()  # before the last read, so that no line is missed
        if over or turn % RESCAN_TURNS == 0:
            later = [] if attempt else [n for n in attempts(run_dir) if n > newest]
            skip = tail if turn == 0 else None
            for number in (newest, *later):
                add_new_files(growing, log_files(run_dir, number, rank, hosts), number, skip)
            newest = max([newest, *later])
        for log in list(growing.values()):
            yield from log.more(last=over or log.attempt < newest)
        if over:
            return
        growing = {path: log for path, log in growing.items() if log.attempt >= newest}
        clock.sleep(POLL_S)


def add_new_files(
    growing: dict[Path, FollowedLog], files: Iterable[LogFile], attempt: int, tail: int | None
) -> None:
    for file in files:
        if file.path not in growing:
            first = 0 if tail is None else start_of_tail(file.path, tail)
            growing[file.path] = FollowedLog(file, attempt, first)

"""Reads dumps in a process of limited time and memory, so that a malicious file breaks only that
process. `reader_client` starts it.

It imports only the standard library and `dumps`, so that it starts quickly. It reads one JSON list
of `[rank, path]` from standard input. It writes frames to standard output: eight bytes of length
and a pickle of `Batch`.
"""

import gc
import mmap
import os
import pickle
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.contract.read_json import read_json
from orchestrator.diagnosis.dumps.dump import (
    MOST_BYTES,
    DumpTimes,
    GroupProgress,
    RankDump,
    Unreadable,
    condense,
    parse,
    times_of,
)

MOST_MEMORY = 3 << 29
"""Limit of address space. The largest accepted dump needs less than half of it."""
MOST_CPU_S = 10.0
"""Seconds of CPU for one file. The largest dump needs a third of it."""
BATCH = 500
"""Number of results that are sent together, so that equal values are written only once."""


class Read(NamedTuple):
    """A dump, and times that show to which attempt of which job it belongs."""

    dump: RankDump
    times: DumpTimes


class Refused(NamedTuple):
    name: str
    why: str


Found = Read | Refused


class Batch(NamedTuple):
    first: int
    """Position of the first result among all files."""
    found: list[Found]


def read_dump(rank: int, path: Path, history: int) -> Found:
    """One rank's reduced dump. Call it only for trusted files, or from `main`."""
    try:
        data, written_s = _bytes(path)
        raw = parse(data)
        return Read(condense(rank, raw, history), times_of(raw, written_s))
    except (OSError, Unreadable) as exc:
        return Refused(path.name, str(exc))
    except (MemoryError, RecursionError) as exc:
        return Refused(path.name, f"it needs more than any dump does ({type(exc).__name__})")


def _bytes(path: Path) -> tuple[bytes, float]:
    """Content and time of writing. Pipes are refused, because reading one could block."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable("not a regular file")
        data = file.read(MOST_BYTES + 1) if found.st_size <= MOST_BYTES else b""
    if found.st_size > MOST_BYTES or len(data) > MOST_BYTES:
        raise Unreadable(f"larger than {MOST_BYTES >> 20} MiB")
    return data, found.st_mtime


def shared(found: Iterable[Found], held: dict[Any, Any]) -> Iterator[Found]:
    """The same results, with equal values `held` only once: of 100,000 dumps that is most of the
    memory."""

    def same(value: Any) -> Any:
        return held.setdefault(value, value)

    for one in found:
        if isinstance(one, Read):
            share(one.dump, same)
        yield one


def share(dump: RankDump, same: Callable[[Any], Any]) -> None:
    dump.paths = same(dump.paths)
    dump.seats = {same(group): _same_seat(seat, same) for group, seat in dump.seats.items()}


def _same_seat(seat: GroupProgress, same: Callable[[Any], Any]) -> Any:
    calls = tuple(same(call._replace(op=same(call.op))) for call in seat.calls)
    return same(seat._replace(calls=same(calls)))


def main(history: int, mark: int) -> None:
    """`mark`: descriptor of a file of eight bytes with the position of the file that is being read,
    so that the parent knows which file killed this process."""
    _limit()
    gc.disable()  # dumps contain no cycles, and there are many of them
    files: list[tuple[int, str]] = read_json(sys.stdin.buffer.read())
    at = mmap.mmap(mark, 8)
    for first in range(0, len(files), BATCH):
        read = _each(files[first : first + BATCH], first, history, at)
        _send(Batch(first, list(shared(read, {}))))


def _each(
    files: Sequence[tuple[int, str]], first: int, history: int, at: mmap.mmap
) -> Iterator[Found]:
    for place, (rank, path) in enumerate(files, first):
        at[:8] = place.to_bytes(8, "little")
        # A limit of CPU time, set in the kernel: it also ends code that never returns to Python.
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        yield read_dump(rank, Path(path), history)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit() -> None:
    """The machine may have a lower limit already."""
    for which, wanted in ((resource.RLIMIT_AS, MOST_MEMORY), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(which)[1]
        least = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(which, (least, least))


def _send(batch: Batch) -> None:
    data = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
    sys.stdout.buffer.write(len(data).to_bytes(8, "little"))
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()

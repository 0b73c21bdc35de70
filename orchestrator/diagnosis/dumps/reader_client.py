"""Reads untrusted dumps in another process (`reader`) with limited time and memory. If a file
breaks the process, the file is reported with the reason, and a new process reads the rest.
"""

import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orchestrator
from orchestrator.diagnosis.dumps.dump import HISTORY
from orchestrator.diagnosis.dumps.reader import MOST_CPU_S, Batch, Found, Refused, shared

MANY = 2_000
"""From this number of files on, several processes read them, and less history is kept."""
LITTLE_HISTORY = 2
MOST_READERS = 8
MOST_DEATHS = 16
"""Number of readers that may die over one folder. A user who made more such files gets no
answer."""
SILENT_S = 120.0
"""Seconds without output from a reader, which reports every 500 files. Then storage is blocked."""
START = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from orchestrator.diagnosis.dumps.reader import main;"
    " main(int(sys.argv[2]), int(sys.argv[3]))"
)
"""Does not import modules from the working directory."""
Files = Sequence[tuple[int, Path]]


def read_dumps(files: Files, history: int | None = None) -> list[Found]:
    """The content of each of `files` (rank, path), in order."""
    if not files:
        return []
    few = len(files) < MANY
    kept = history if history is not None else HISTORY if few else LITTLE_HISTORY
    many = 1 if few else min(MOST_READERS, os.cpu_count() or 1)
    size = -(-len(files) // many)
    shares = [files[i : i + size] for i in range(0, len(files), size)]
    with ThreadPoolExecutor(len(shares)) as pool, _nothing_to_collect():
        read = partial(_read_share, history=kept, held={})
        return [one for share in pool.map(read, shares) for one in share]


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """Garbage collection off: dumps contain no cycles, and searching 100,000 of them takes longer
    than reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read_share(files: Files, history: int, held: dict[Any, Any]) -> list[Found]:
    """One reader after another, until each file has a result."""
    found: dict[int, Found] = {}
    todo, deaths = [list(range(len(files)))], 0
    while todo:
        left = todo.pop()
        if deaths == MOST_DEATHS and left[-1] > max(found):
            why = f"not read: {deaths} earlier files broke their reader"
            found |= {place: Refused(files[place][1].name, why) for place in left}
            continue
        came, broke = _by_one_reader([files[place] for place in left], history, held)
        found |= {left[place]: one for place, one in came.items()}
        if broke is not None:
            place, why = broke
            found[left[place]] = Refused(files[left[place]][1].name, why)
            deaths += 1
            # Files before it that were read but not sent are read again first; they are harmless.
            parts = left[place + 1 :], left[len(came) : place]
            todo += [part for part in parts if part]
    return [found[place] for place in range(len(files))]


def _by_one_reader(
    files: Files, history: int, held: dict[Any, Any]
) -> tuple[dict[int, Found], tuple[int, str] | None]:
    """Results by position, and the position of the file that ended the reader, with the reason."""
    found: dict[int, Found] = {}
    with tempfile.TemporaryFile() as mark:
        mark.write(bytes(8))
        mark.flush()
        root = str(Path(orchestrator.__file__).parents[1])
        argv = [sys.executable, "-I", "-c", START, root, str(history), str(mark.fileno())]
        with subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(mark.fileno(),),
        ) as reader:
            try:
                why = _hand_over(reader, files)
                for batch in _batches(reader):
                    found |= dict(enumerate(shared(batch.found, held), batch.first))
            except TimeoutError:
                why = f"its storage did not respond within {SILENT_S:.0f} s"
            finally:
                reader.kill()  # has no effect if it has ended
        if len(found) == len(files):
            return found, None
        mark.seek(0)
        at = int.from_bytes(mark.read(8), "little")
    return found, (min(at, len(files) - 1), why or _how_it_ended(reader.returncode))


def _hand_over(reader: subprocess.Popen[bytes], files: Files) -> str:
    assert reader.stdin is not None
    named = [(rank, str(path)) for rank, path in files]
    try:
        with reader.stdin:
            reader.stdin.write(json.dumps(named).encode())
    except BrokenPipeError:
        return "its reader did not start"
    return ""


def _batches(reader: subprocess.Popen[bytes]) -> Iterator[Batch]:
    """Batches until the reader ends. Raises TimeoutError."""
    assert reader.stdout is not None
    read = partial(_exactly, reader.stdout.fileno())
    while len(head := read(8)) == 8:
        size = int.from_bytes(head, "little")
        body = read(size)
        if len(body) < size:
            return
        yield pickle.loads(body)


def _exactly(fd: int, size: int) -> bytes:
    """Returns less if the other end is closed."""
    parts, left = [], size
    while left:
        if not select.select([fd], [], [], SILENT_S)[0]:
            raise TimeoutError
        part = os.read(fd, min(left, 1 << 20))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"reading it takes more than {MOST_CPU_S:.0f} s, which no dump does"
    if code < 0:
        return f"it broke its reader ({signal.Signals(-code).name}), which no dump does"
    return f"its reader ended with code {code}"

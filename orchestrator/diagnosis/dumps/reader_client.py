"""Dumps that anybody may have written are read in a process beside this one (`reader`), whose time
and memory are bounded. One that breaks it is named with why, and another process reads the rest.
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
"""From so many files on they are read by several processes, and little history is kept."""
LITTLE_HISTORY = 2
MOST_READERS = 8
MOST_DEATHS = 16
"""Readers that may die over one folder: whoever made more such files may wait for no answer."""
SILENT_S = 120.0
"""Without a word from a reader, which says one for every 500 files: storage does not answer it."""
START = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from orchestrator.diagnosis.dumps.reader import main;"
    " main(int(sys.argv[2]), int(sys.argv[3]))"
)
"""No module of the folder that it is started in is imported in the place of ours."""
Files = Sequence[tuple[int, Path]]


def read_dumps(files: Files, history: int | None = None) -> list[Found]:
    """What each of `files` (rank, path) holds, in their order."""
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
    """Dumps hold no cycles, and to look for some in 100,000 takes longer than to read them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read_share(files: Files, history: int, held: dict[Any, Any]) -> list[Found]:
    """By one reader after the other, until each file has its answer."""
    found: dict[int, Found] = {}
    todo, deaths = [list(range(len(files)))], 0
    while todo:
        left = todo.pop()
        if deaths == MOST_DEATHS and left[-1] > max(found):
            why = f"not read: {deaths} files before it broke their reader"
            found |= {place: Refused(files[place][1].name, why) for place in left}
            continue
        came, broke = _by_one_reader([files[place] for place in left], history, held)
        found |= {left[place]: one for place, one in came.items()}
        if broke is not None:
            place, why = broke
            found[left[place]] = Refused(files[left[place]][1].name, why)
            deaths += 1
            # What was read before it, and not sent yet, comes first: none of that breaks a reader.
            parts = left[place + 1 :], left[len(came) : place]
            todo += [part for part in parts if part]
    return [found[place] for place in range(len(files))]


def _by_one_reader(
    files: Files, history: int, held: dict[Any, Any]
) -> tuple[dict[int, Found], tuple[int, str] | None]:
    """What it read, by place; and the place of the file that ended it, with why."""
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
                why = f"its storage did not answer within {SILENT_S:.0f} s"
            finally:
                reader.kill()  # one that is done is gone already
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
        return "its reader did not begin"
    return ""


def _batches(reader: subprocess.Popen[bytes]) -> Iterator[Batch]:
    """Until it ends. Raises TimeoutError."""
    assert reader.stdout is not None
    read = partial(_exactly, reader.stdout.fileno())
    while len(head := read(8)) == 8:
        size = int.from_bytes(head, "little")
        body = read(size)
        if len(body) < size:
            return
        yield pickle.loads(body)


def _exactly(fd: int, size: int) -> bytes:
    """Less where the other end is closed."""
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
        return f"to read it takes more than {MOST_CPU_S:.0f} s: no dump is like that"
    if code < 0:
        return f"it broke its reader ({signal.Signals(-code).name}): no dump is like that"
    return f"its reader ended with code {code}"

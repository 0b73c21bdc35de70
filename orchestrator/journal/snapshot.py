"""`state.json`: the fold of the journal up to some line, so that a new leader folds only the rest.

The journal stays the only source of truth. A snapshot is ignored, and the whole journal folded, if
it is damaged, belongs to another journal, or was written by another ndctl, whose rules may give
another state.

    {"v": 1, "made_by": "…", "launch": 3, "place": {"lines": 5000, "offset": 1234567}, …}
    {"job": …}
"""

import functools
import json
import logging
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec import Struct

from ndctl.rank.regular_file import open_regular, read_regular
from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.files.atomic_write import written_beside
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.read_json import read_json
from orchestrator.job.state import Run
from orchestrator.job.transitions import fold
from orchestrator.journal.journal import Place, Tail
from orchestrator.journal.supervisor import NOTHING, Folded

log = logging.getLogger(__name__)

VERSION = 1
BEFORE = 4096
"""Number of bytes of the journal whose digest identifies the journal."""
DECIDE = ("contract", "inventory", "plan", "diagnosis", "job", "errors.py", "host_strikes.py")
"""Parts of `orchestrator` that determine the fold of a journal."""

ReadBefore = Callable[[int, int], bytes]
"""Reads `length` bytes of the journal that end at an offset; fewer if it is shorter."""


class Head(Struct, frozen=True, kw_only=True):
    """First line of a snapshot."""

    v: int
    made_by: str
    """Digest of the sources in `DECIDE`."""
    launch: int
    """Newest launch in the journal up to `place`."""
    place: Place
    before: str
    """Digest of the journal's last bytes before `place`."""
    run: str
    """Digest of the second line."""


class Unfit(ValueError):
    """The snapshot is damaged, or of another journal or another ndctl."""


@functools.cache
def made_by() -> str:
    """Digest of this process's sources, read once. A leader calls it when it starts: an upgrade may
    replace the files while it runs, but it keeps deciding by the sources with which it started."""
    return digest(Path(__file__).parent.parent)


def digest(root: Path) -> str:
    found = sha256()
    for part in DECIDE:
        files = [root / part] if part.endswith(".py") else (root / part).rglob("*")
        for path in sorted(file for file in files if file.suffix in (".py", ".yaml", ".json")):
            data = path.read_bytes()
            found.update(f"{path.relative_to(root)} {len(data)}\n".encode() + data)
    return found.hexdigest()


def to_bytes(folded: Folded, maker: str, read_before: ReadBefore) -> bytes:
    # `EndedHosts` is written as the dictionary that it stands for.
    run, place = msgspec.json.encode(folded.run, enc_hook=dict), folded.place
    head = Head(
        v=VERSION,
        made_by=maker,
        launch=folded.run.job.launch.launch if folded.run.job else 0,
        place=place,
        before=_before(place, read_before),
        run=sha256(run).hexdigest(),
    )
    return json.dumps(encode(head)).encode() + b"\n" + run + b"\n"


def from_bytes(data: bytes, maker: str, read_before: ReadBefore) -> Folded:
    """Raises Unfit."""
    line, _, run = data.partition(b"\n")
    head = _head(line, maker, read_before)
    if not run.endswith(b"\n") or sha256(run[:-1]).hexdigest() != head.run:
        raise Unfit("it is incomplete")
    try:
        return Folded(run=msgspec.json.decode(run, type=Run), place=head.place)
    except (ValueError, RecursionError) as exc:
        raise Unfit(f"it cannot be read: {exc!r}") from exc


def _head(line: bytes, maker: str, read_before: ReadBefore) -> Head:
    try:
        head: Head = decode(Head, read_json(line))
    except (ValueError, Invalid) as exc:
        raise Unfit(f"another ndctl wrote it, or it is damaged: {exc!r}") from exc
    # The rules of another ndctl may fold the same journal to another state.
    if (head.v, head.made_by) != (VERSION, maker):
        raise Unfit("another ndctl wrote it")
    if _before(head.place, read_before) != head.before:
        raise Unfit("it is of another journal")
    return head


def _before(place: Place, read_before: ReadBefore) -> str:
    if place.offset < 1:
        raise Unfit("it was taken before the first line")
    data = read_before(place.offset, min(BEFORE, place.offset))
    # A crash may have cut lines off that the snapshot has already folded.
    if len(data) < min(BEFORE, place.offset) or not data.endswith(b"\n"):
        raise Unfit("it is of another journal, or of a longer version of this one")
    return sha256(data).hexdigest()


def _reader(path: Path) -> ReadBefore:
    def read_before(offset: int, length: int) -> bytes:
        with open_regular(path) as file:
            return os.pread(file.fileno(), length, offset - length)

    return read_before


def write(run_dir: RunDir, folded: Folded, guard: Callable[[], None]) -> None:
    """Replaces the file atomically and returns when it is on disk.

    Raises OSError, and what the guard raises if another leader has taken over.
    """
    data = to_bytes(folded, made_by(), _reader(run_dir.journal))
    with written_beside(run_dir.state, data, durable=True) as fresh:
        # Right before the file is replaced: a new leader may have written a newer snapshot.
        guard()
        fresh.replace(run_dir.state)


def read_head(run_dir: RunDir) -> Head | None:
    """First line of the snapshot; None if there is no valid snapshot."""
    try:
        with open_regular(run_dir.state) as file:
            return _head(file.readline(), made_by(), _reader(run_dir.journal))
    except (OSError, Unfit):
        return None


def load(run_dir: RunDir) -> Folded:
    """The snapshot; `NOTHING` if there is no valid one."""
    maker = made_by()  # must be computed at start, even if there is no snapshot yet
    try:
        return from_bytes(read_regular(run_dir.state), maker, _reader(run_dir.journal))
    except FileNotFoundError:
        return NOTHING
    # The journal has everything that a snapshot has, so a bad one costs only time.
    except (OSError, Unfit) as exc:
        log.info("ignoring snapshot %s, folding the whole journal: %s", run_dir.state, exc)
        return NOTHING


def recall(run_dir: RunDir) -> tuple[Run, Tail]:
    """State at some line of the journal, and a reader of the lines after it."""
    # `load` reads all sources for their digest, which a command need not wait for if there is no
    # snapshot.
    found = load(run_dir) if run_dir.state.exists() else NOTHING
    return found.run, Tail(run_dir.journal, found.place)


def replay(run_dir: RunDir) -> Run:
    """The fold of the journal. Raises OSError, and JobError if a line cannot be read."""
    run, tail = recall(run_dir)
    return fold((entry.event for entry in tail.each()), run)

"""The journal: append-only JSON lines with one writer. A line is on disk before it is acted on.

A line holds an event and the actions that `step` decided on it:

    {"v": 1, "seq": 7, "event": {"kind": "RankExited", …}, "actions": [{"kind": "StopAttempt", …}]}

Several lines may be written in one write. A crash can cut the last write short at any byte: a
reader ignores the incomplete line, and the next writer removes it. When a host dies, the file
system may have kept the end of the last write but not its middle, which then reads as zeros:
everything from the zeros on is ignored. That is safe, because the write had not returned, so
nothing was acted on.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec
from msgspec import Struct

from ndctl.rank.regular_file import open_regular
from orchestrator.contract.codec import Invalid, decode, encode_tagged
from orchestrator.contract.messages import wire
from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.events import Event
from orchestrator.contract.read_json import read_json
from orchestrator.contract.times import check_time, date_time
from orchestrator.errors import InUse, JobError
from orchestrator.posix.locks import is_held_alone, try_lock
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

VERSION = 1
MOST_LINES = 256
"""Largest number of lines in one write."""
LOCK_PATIENCE_S = 2.0
LOCK_POLL_S = 0.02


class Entry(Struct, frozen=True, kw_only=True):
    """One line of the journal."""

    seq: int
    event: Event
    actions: tuple[Action, ...]


class Place(Struct, frozen=True, kw_only=True):
    """A position between two lines of a journal."""

    lines: int = 0
    """Number of lines before it."""
    offset: int = 0
    """Number of bytes before it."""


BEGINNING = Place()

Decided = Sequence[tuple[Event, tuple[Action, ...]]]
"""Events in their order, each with the actions that `step` decided on it."""


def to_json(entry: Entry) -> dict[str, Any]:
    return {
        "v": VERSION,
        "seq": entry.seq,
        "event": encode_tagged(entry.event),
        "actions": [encode_tagged(action) for action in entry.actions],
    }


HEAD, TAIL = b'{"v":%d,"seq":' % VERSION, b',"actions":[]}\n'
"""How a line begins, and how one ends whose event led to no action. Nearly all end so."""


def to_line(entry: Entry) -> bytes:
    actions = b",".join(map(wire.encode, entry.actions))
    event = wire.encode(entry.event)
    return b'%s%d,"event":%s,"actions":[%s]}\n' % (HEAD, entry.seq, event, actions)


class _Line(msgspec.Struct):
    v: int
    seq: int
    event: msgspec.Raw
    actions: list[msgspec.Raw]


_lines = msgspec.json.Decoder(_Line)
EVENTS, ACTIONS = wire.Decoder(Event), wire.Decoder(Action)


def from_line(line: bytes) -> Entry:
    """Raises ValueError if the line is not of this version."""
    # msgspec first, which is about 20 times as fast. Lines of older versions need the codec.
    return _of_this_ndctl(line) or _of_another(line)


def _of_this_ndctl(line: bytes) -> Entry | None:
    """None if this ndctl would write the line differently."""
    # Nearly all lines are like this, so their parts are cut out without reading the JSON.
    if line.startswith(HEAD) and line.endswith(TAIL):
        number, _, text = line[len(HEAD) : -len(TAIL)].partition(b',"event":')
        if not number.isdigit() or number.startswith(b"0"):
            return None
        return _entry_of(int(number), EVENTS.decode_exact(text), ())
    try:
        body = _lines.decode(line)
    except (ValueError, RecursionError):
        return None
    event = EVENTS.decode_exact(bytes(body.event))
    actions = tuple(ACTIONS.decode_exact(bytes(action)) for action in body.actions)
    entry = _entry_of(body.seq, event, actions)
    # Another ndctl may have written other keys around the event. The codec reads such a line.
    exact = entry is not None and to_line(entry) == (line if line.endswith(b"\n") else line + b"\n")
    return entry if exact else None


def _entry_of(seq: int, event: Event | None, actions: tuple[Any, ...]) -> Entry | None:
    """None if a part was not read. Raises ValueError if the time cannot be one of a job."""
    if event is None or None in actions:
        return None
    check_time(event.at)
    return Entry(seq=seq, event=event, actions=actions)


def _of_another(line: bytes) -> Entry:
    body = read_json(line)
    if body["v"] != VERSION:
        raise ValueError(f"journal version {body['v']}, this ndctl reads {VERSION}")
    actions: tuple[Action, ...] = tuple(decode(Action, action) for action in body["actions"])
    event: Event = decode(Event, body["event"])
    check_time(event.at)
    return Entry(seq=body["seq"], event=event, actions=actions)


def parse(data: bytes, before: int = 0) -> Iterator[Entry]:
    """Entries of a journal's bytes, without an incomplete last line. The bytes start after line
    `before`.

    Raises:
        JobError: a complete line cannot be read, which a crash cannot explain.
    """
    for number, line in enumerate(data.split(b"\n")[:-1], before + 1):
        yield _entry(line, number)


def _entry(line: bytes, number: int | None, path: Path | None = None) -> Entry:
    """`number` is the line's number; None for the last line."""
    try:
        return from_line(line)
    except (ValueError, KeyError, TypeError, Invalid) as exc:
        where = "" if path is None else f"{path}: "
        which = "the last journal line" if number is None else f"journal line {number}"
        raise JobError(
            f"{where}{which} cannot be read: {_why(exc)}",
            fix="read it with the ndctl that wrote it; if the file was damaged, restore it, or"
            " start the job from the beginning with `ndctl submit SPEC --new`",
        ) from exc


def _why(exc: Exception) -> str:
    """What is wrong with a line. The fixes of the codec are for specs: nobody edits a journal."""
    if not isinstance(exc, Invalid):
        return str(exc)
    return "; ".join(f"{one.path}: {one.said}" if one.path else one.said for one in exc.problems)


def complete_length(data: bytes | bytearray) -> int:
    """Length of the part at the beginning that consists of complete lines."""
    hole = data.find(b"\0")  # JSON escapes zeros, so only a crash leaves them
    # Zeros further back than one write are damage that no crash explains. They stay, so that the
    # reader reports them.
    if hole >= 0 and data.count(b"\n", hole) <= MOST_LINES:
        data = data[:hole]
    return data.rfind(b"\n") + 1


class Tail:
    """Reads the lines that were added to a journal since the last read."""

    def __init__(self, path: Path, place: Place = BEGINNING) -> None:
        self.path = path
        self.offset = place.offset
        self.lines = place.lines

    @property
    def place(self) -> Place:
        return Place(lines=self.lines, offset=self.offset)

    def more(self) -> tuple[Entry, ...]:
        return tuple(self.each())

    def each(self) -> Iterator[Entry]:
        """One entry at a time, because a journal of weeks needs gigabytes of memory."""
        # An agent may look before the first launch has written a line.
        if not self.path.exists():
            return
        with open_regular(self.path) as file:
            file.seek(self.offset)
            for line in _whole(file):
                entry = _entry(line, self.lines + 1, self.path)
                self.offset, self.lines = self.offset + len(line), self.lines + 1
                yield entry


def _whole(file: BinaryIO) -> Iterator[bytes]:
    """Lines from the file's position on, up to what a crash cut short."""
    for line in file:
        # The leader is writing this line, or a crash cut it short.
        if not line.endswith(b"\n"):
            return
        # A line with zeros is ignored only if they are in the last write. Else reading it raises an
        # error.
        if b"\0" in line and not complete_length(line + file.read()):
            return
        yield line


def read(path: Path) -> tuple[Entry, ...]:
    return Tail(path).more()


def mark(kind: type[Event] | type[Action]) -> bytes:
    """Bytes in every line with an event or action of `kind`. Texts cannot contain them, because
    their quotes are escaped."""
    return b'{"kind":"%s"' % kind.__name__.encode()


def entries_of(
    path: Path, *kinds: type[Event] | type[Action], attempt: int | None = None
) -> Iterator[Entry]:
    """Entries with an event or action of one of these kinds; with `attempt`, only of that attempt.

    A journal of weeks has a million other lines, which are skipped without decoding them. Raises
    OSError, and JobError if one of the matching lines cannot be read.
    """
    marks = tuple(map(mark, kinds))
    of_it = b"" if attempt is None else b'"attempt":%d,' % attempt
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        for number, line in enumerate(_whole(file), 1):
            if of_it in line and any(one in line for one in marks):
                entry = _entry(line, number, path)
                # The line also matches if an action, but not the event, names the attempt.
                if attempt is None or getattr(entry.event, "attempt", None) == attempt:
                    yield entry


def damaged_end(path: Path) -> str | None:
    """A sentence about damage at the end of a journal; None if there is at most an incomplete line,
    as while a leader writes. Raises OSError."""
    if not path.exists():
        return None
    with open_regular(path) as file:
        return _lost(path, file.fileno())


def _lost(path: Path, fd: int) -> str | None:
    size = os.fstat(fd).st_size
    end, last = _end_of(fd, size)
    pieces = (os.pread(fd, LEAST_READ, at) for at in range(end, size, LEAST_READ))
    if not any(b"\0" in piece for piece in pieces):
        return None
    since = "from its start"
    with contextlib.suppress(ValueError, KeyError, TypeError):  # reported when the line is read
        entry = from_line(last)
        since = f"after line {entry.seq:,}, of {date_time(entry.event.at)}"
    return (
        f"{path} cannot be read {since}: the last {size - end:,} of its {size:,} bytes are zeros,"
        " or follow zeros, as after a machine crashed during a write; what happened later is not"
        " known"
    )


def has_writer(path: Path) -> bool:
    """Whether a process, normally the leader, has the journal open for writing."""
    return is_held_alone(path)


def _open_alone(path: Path, clock: Clock, patience_s: float) -> int:
    """A descriptor with the exclusive lock. It waits, because `has_writer` in another process takes
    the lock for a moment."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    deadline = clock.monotonic() + patience_s
    while not try_lock(fd):
        if clock.monotonic() < deadline:
            clock.sleep(LOCK_POLL_S)
            continue
        os.close(fd)
        raise InUse(
            f"{path} is being written by another process",
            fix="the job is running: see `ndctl status`, or cancel it first",
        )
    return fd


LEAST_READ = 1 << 18
DAMAGED = "journal.damaged"
"""File next to a journal for ends of it that cannot be read."""


def last_before(path: Path, place: Place) -> Entry | None:
    """The last entry before `place`; None at the beginning. Raises OSError and JobError."""
    with open_regular(path) as file:
        _, last = _end_of(file.fileno(), place.offset)
    return _entry(last, place.lines, path) if last else None


def position_after(path: Path, kind: type[Event] | type[Action], before: Place) -> Place:
    """The position after the last entry of `kind` before a place; the beginning if there is none.

    Raises OSError.
    """
    marked = mark(kind)
    end, lines, rest = before.offset, before.lines, b""
    with open_regular(path) as file:
        while end > 0:
            begun = max(0, end - LEAST_READ)
            data = os.pread(file.fileno(), end - begun, begun) + rest
            at = data.rfind(marked)
            if at >= 0:
                after = data.index(b"\n", at) + 1
                return Place(lines=lines - data.count(b"\n", after), offset=begun + after)
            # The line that begins before this piece is searched together with the next piece.
            cut = data.find(b"\n") + 1 or len(data)
            rest, end, lines = data[:cut], begun, lines - data.count(b"\n", cut)
    return BEGINNING


def _end_of(fd: int, end: int) -> tuple[int, bytes]:
    """Length of the complete lines up to offset `end`, and the last of these lines.

    Only the end of the file is read, because a journal of weeks has hundreds of megabytes. What a
    crash left is never longer than one write.
    """
    length = LEAST_READ
    while True:
        first = max(0, end - length)
        data = os.pread(fd, end - first, first)
        whole = complete_length(data)
        last = data.rfind(b"\n", 0, max(0, whole - 1)) + 1
        # More lines than one write can have must be read, because zeros at the end count only up to
        # that many lines.
        if first == 0 or (last and data.count(b"\n") > MOST_LINES + 1):
            return first + whole, data[last:whole]
        length *= 2


class Journal:
    """The only writer. It holds a lock on the file as long as it is open."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        patience_s: float = LOCK_PATIENCE_S,
        guard: Callable[[], None] | None = None,
    ) -> None:
        """Remove the incomplete end that a crash may have left.

        Args:
            guard: called before each write; raises if this process must not write any more.

        Raises:
            InUse: another process still has the journal open after `patience_s`.
            JobError: the last line cannot be read.
        """
        self.path = path
        self.guard = guard
        # The lock comes first: without it another leader could still add lines to the end that is
        # read next.
        self.fd = _open_alone(path, clock, patience_s)
        try:
            self.size, last = _end_of(self.fd, os.fstat(self.fd).st_size)
            self.seq = _entry(last, None, path).seq if last else 0
            if lost := _lost(path, self.fd):
                self._keep_damaged_end(lost)
        # Else this process would keep the lock on a journal that it does not use.
        except JobError:
            os.close(self.fd)
            raise
        # Only now, because a journal that cannot be read stays as it was.
        self._drop_torn()

    def _keep_damaged_end(self, lost: str) -> None:
        """Without its zeros. There may be lines that a person can still read."""
        places = range(self.size, os.fstat(self.fd).st_size, LEAST_READ)
        pieces = (os.pread(self.fd, LEAST_READ, at).replace(b"\0", b"") for at in places)
        text, kept = b"".join(pieces), self.path.with_name(DAMAGED)
        log.warning("removing the damaged end of the journal: %s", lost)
        if not text:
            return
        try:
            with kept.open("ab") as file:
                file.write(text)
        except OSError as exc:
            log.warning("what can be read of it is not kept: %s", exc)
        else:
            log.warning("what can be read of it is in %s", kept)

    @property
    def place(self) -> Place:
        """The end of the journal."""
        return Place(lines=self.seq, offset=self.size)

    def after(self, place: Place = BEGINNING) -> Iterator[Entry]:
        """Entries after `place`, one at a time. Raises JobError if a line is damaged."""
        return Tail(self.path, place).each()

    def _drop_torn(self) -> None:
        if os.fstat(self.fd).st_size > self.size:
            os.ftruncate(self.fd, self.size)

    def append(self, event: Event, actions: Iterable[Action] = ()) -> Entry:
        """Write one line; see `extend`."""
        (entry,) = self.extend([(event, tuple(actions))])
        return entry

    def extend(self, decided: Decided) -> tuple[Entry, ...]:
        """Write a line for each event, at most `MOST_LINES`, and wait until all are on disk.

        Raises OSError if the disk does not accept them, and what the guard raises. The file is then
        as it was before.
        """
        assert len(decided) <= MOST_LINES, f"{len(decided)} lines in one write"
        # The lock is not enough: a file server takes it from a host that it considers dead, while a
        # leader there may still run.
        if self.guard is not None:
            self.guard()
        entries = tuple(
            Entry(seq=seq, event=event, actions=actions)
            for seq, (event, actions) in enumerate(decided, self.seq + 1)
        )
        data = b"".join(map(to_line, entries))
        self._drop_torn()  # an earlier failed write may have left bytes that could not be removed
        try:
            written = os.write(self.fd, data)
            # A full disk takes a part of the line without an error.
            if written != len(data):
                raise OSError(errno.ENOSPC, "only part of a line was written", str(self.path))
            # The actions are performed next. A crash must not lose the line that explains them.
            os.fsync(self.fd)
        # A reader must not see lines whose events were not acted on.
        except OSError:
            self._drop_torn()
            raise
        self.seq, self.size = self.seq + len(entries), self.size + len(data)
        return entries

    def cut_back(self, end: Place) -> None:
        """Remove the lines after `end`, which were not acted on yet. Raises OSError."""
        os.ftruncate(self.fd, end.offset)
        os.fsync(self.fd)
        self.seq, self.size = end.lines, end.offset

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self.fd)

"""Reads the flight recorder dump of one rank safely, and reduces it to what a diagnosis needs.

torch writes dumps as pickle (`_dump_fr_trace`, and the NCCL watchdog) or JSON
(`_dump_fr_trace_json`). A pickle can run code, so only plain values are accepted. Each value is
checked before use: a list where a name is expected can take for ever to hash or to print. A pickle
that exhausts its reader, for example by asking for gigabytes, is contained by `reader`. A dump does
not contain the rank's number; the name of its file does.
"""

import gzip
import io
import pickle
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from orchestrator.contract.read_json import read_json

KEPT = 64
"""Number of pending operations of a group that are kept. The oldest matter."""
HISTORY = 48
"""Number of completed operations of a group that are kept. A rank that differs shows in them."""
SHORTEST_PATH = 8
"""Number of a rank's last calls that are kept in order, however small `history` is."""
OF_AN_IDLE_RANK = {"version", "pg_config"}
"""Other keys that torch writes. In JSON it leaves `entries` out if there are none (2.13)."""
MOST_BYTES = 1 << 26
"""Size limit of an unpacked dump. One of 2,000 operations with stacks has a twentieth of this."""
MOST_RANKS = 1 << 20
"""Largest number of ranks of a job."""
MOST_CHARACTERS = 1_000
"""Longest name."""
MOST_DIMENSIONS = 64
MOST_TENSORS = 1 << 16
"""Largest number of tensors of an operation. A coalesced operation lists all of its tensors."""
GZIP = b"\x1f\x8b"
OLD = (
    "torch 2.3 or older wrote it, and such dumps do not number the calls of each group; torch 2.4"
    " and newer do"
)
P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class DumpTimes(NamedTuple):
    """Shows to which attempt of which job a dump belongs."""

    since_s: float | None
    """When the oldest operation in it was called, by its host's clock; None: it has no operation,
    or no times."""
    until_s: float | None
    """When the newest operation in it was called."""
    written_s: float
    """When the file was written. Copying may change it."""
    world: int | None
    """Number of ranks of the job; None: the dump does not say."""


class Unreadable(ValueError):
    """The file is not a dump, or is damaged."""


class Op(NamedTuple):
    """Operation of a rank in a group. Those of its peers must match it."""

    kind: str
    inputs: str
    outputs: str
    dtypes: str

    def fits(self, other: "Op") -> bool:
        """Whether two ranks may call these two together."""
        if self.kind != other.kind or self.dtypes != other.dtypes:
            return False
        if self.kind in UNEVEN:
            return True
        return self.inputs == other.inputs and self.outputs == other.outputs

    def __str__(self) -> str:
        return f"{self.kind} {self.inputs}→{self.outputs} {self.dtypes}"


WORLD = "default_pg"
"""torch's name of the group of all ranks."""
UNEVEN = frozenset(
    {"all_to_all", "all_to_all_v_single", "scatter", "gather", "all_gather_v", "reduce_scatter_v"}
)
"""Operations in which ranks may pass tensors of different sizes."""
ONE_SIDED = frozenset({"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "scatter", "gather"})
"""Operations that may be complete on one rank while others still wait, such as a broadcast on its
source."""


class Call(NamedTuple):
    seq: int
    op: Op
    started: bool


class GroupProgress(NamedTuple):
    """Progress of a rank in one group."""

    entered: int
    """Number of the newest collective that it called."""
    done: int
    """Number of the newest completed collective; 0: none in the buffer."""
    calls: tuple[Call, ...]
    """Pending operations and the last completed ones, oldest first."""

    @property
    def pending(self) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.seq > self.done)

    @property
    def behind(self) -> int:
        """Number of completed operations, including those no longer in the buffer."""
        pending = self.pending
        return pending[0].seq - 1 if pending else self.entered


class GroupId(NamedTuple):
    name: str
    desc: str
    members: tuple[int, ...]
    """Ranks of the job; empty if the dump does not say, as in dumps of gloo."""


class PeerCall(NamedTuple):
    """A pending send or receive."""

    group: GroupId
    sends: bool
    peer: int
    """Rank in the job; rank in the group if the group's members are unknown."""


@dataclass(slots=True)
class RankDump:
    rank: int
    seats: dict[GroupId, GroupProgress] = field(default_factory=dict)
    talks: tuple[PeerCall, ...] = ()
    last: GroupId | None = None
    """The group whose operation it called last."""
    first: GroupId | None = None
    """The group of its oldest pending operation; None: that is a send or receive."""
    paths: tuple[tuple[tuple[str, int], ...], ...] = ()
    """The last collectives of each thread in call order, each as kind of group and number there.

    Ranks with the same work take the same paths. Threads are kept apart, because calls of another
    thread, such as one that saves, mix with the main thread's at another place on each rank. If the
    dump lacks calls in between, a path ends and the next one starts."""
    partial: bool = False
    """The dump contains only pending operations, so it does not show which operations of a group
    are complete. Recorders write such dumps with the option `onlyActive`."""

    @property
    def waits(self) -> bool:
        return bool(self.talks) or any(seat.pending for seat in self.seats.values())


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise Unreadable(f"it wants to load {module}.{name}, which no dump does")


def parse(data: bytes) -> Mapping[str, Any]:
    """The dump in `data`: pickle or JSON, gzipped or not.

    Raises:
        Unreadable: it is neither, or not a dump.
    """
    if not data:
        raise Unreadable("it is empty")
    try:
        data = _unpacked(data) if data.startswith(GZIP) else data
        dump = read_json(data) if data[:1] == b"{" else _Plain(_at_once(data)).load()
    except Unreadable:
        raise
    except MemoryError as exc:
        raise Unreadable("it asks for more memory than any dump needs") from exc
    except Exception as exc:  # the file may contain anything, so any error may occur
        raise Unreadable(f"neither JSON nor a pickle: {exc}"[:MOST_CHARACTERS]) from exc
    if isinstance(dump, list) and _are_old(dump):
        raise Unreadable(OLD)
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise Unreadable("not a flight recorder dump: it has no list of entries")
    if "entries" not in dump and not dump.keys() >= OF_AN_IDLE_RANK:
        raise Unreadable("not a flight recorder dump: it has neither entries nor groups")
    return dump


def times_of(dump: Mapping[str, Any], written_s: float) -> DumpTimes:
    """Times of a dump that `condense` accepted."""
    entries = dump.get("entries") or []
    since, until = (
        (_called_at(entry) for entry in (entries[0], entries[-1])) if entries else 2 * (None,)
    )
    default = (
        config.get("ranks")
        for config in (dump.get("pg_config") or {}).values()
        if config.get("desc") == WORLD
    )
    sizes = [len(_ranks(ranks)) for ranks in default if ranks]
    return DumpTimes(since, until, written_s, max(sizes, default=0) or None)


def _called_at(entry: Mapping[str, Any]) -> float | None:
    found = entry.get("time_created_ns")
    return found / 1e9 if type(found) is int and found > 0 else None


def _unpacked(data: bytes) -> bytes:
    """Unpacked data up to the size limit: a few bytes may unpack to many gigabytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
        found = packed.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise Unreadable(f"it unpacks to more than {MOST_BYTES >> 20} MiB")
    return found


def _at_once(data: bytes) -> io.BufferedReader:
    """A stream with look-ahead. Without it an unpickler reads byte by byte."""
    return io.BufferedReader(io.BytesIO(data), len(data) + 1)


def condense(rank: int, dump: Mapping[str, Any], history: int = HISTORY) -> RankDump:
    """The reduced dump.

    Args:
        history: number of completed operations of each group that are kept, at least one.

    Raises:
        Unreadable: entries lack what every version of the recorder writes.
    """
    if _are_old(dump.get("entries", [])):
        raise Unreadable(OLD)
    try:
        return _Condenser(rank, dump, history).result()
    except Exception as exc:  # the file may contain anything, so any error may occur
        raise Unreadable(f"its entries are not as torch writes them: {_words(exc)}") from exc


def _are_old(entries: Sequence[Any]) -> bool:
    """Whether a recorder wrote them that numbers the calls of a group only all together."""
    newest = entries[-1] if entries else None
    return isinstance(newest, dict) and "seq_id" in newest and "collective_seq_id" not in newest


def _words(exc: Exception) -> str:
    """Text of an error, shortened, because it may contain data of the file."""
    return f"{type(exc).__name__}: {exc}"[:MOST_CHARACTERS] if exc.args else type(exc).__name__


@dataclass(slots=True)
class _Open:
    """A group during the walk through the entries."""

    id: GroupId
    newest: int = -1
    oldest: int = -1
    done: int = 0
    calls: list[Call] = field(default_factory=list)
    """Newest first."""
    bundles: dict[tuple[bool, int], bool] = field(default_factory=dict)
    """Number of a coalesced operation -> whether the whole is done. Its parts have no state."""


class _Condenser:
    """Walks the entries from newest to oldest, so that old completed ones cost little."""

    def __init__(self, rank: int, dump: Mapping[str, Any], history: int) -> None:
        self.rank = rank
        self.history = history
        self.entries = dump.get("entries", [])
        self.status = dump.get("pg_status")
        self.members = {
            str(name): _ranks(config.get("ranks", "[]"))
            for name, config in (dump.get("pg_config") or {}).items()
        }
        self.groups: dict[tuple[str, str], _Open] = {}
        """Keyed by name and description, because ids with all members are slow to hash."""
        self.talks: list[PeerCall] = []
        self.first: GroupId | None = None
        self.paths: dict[str, list[tuple[str, int]]] = {}
        """Thread -> calls, newest first."""
        self.path_length = max(history, SHORTEST_PATH)
        """How many more calls are kept, over all threads."""
        self.ended_paths: list[list[tuple[str, int]]] = []
        """Paths that ended at a call that the dump lacks; each newest first."""
        self.record: int | None = None
        """Number of the record that was processed before, which is the next newer one."""
        self.any_done = self.has_gap = False

    def result(self) -> RankDump:
        for entry in reversed(self.entries):
            self._take(entry)
        for group in self.groups.values():
            if not group.done and group.oldest > 0:
                group.done = group.oldest - 1  # operations of a group complete in order
        used = [group for group in self.groups.values() if group.newest >= 0]
        seats = {
            group.id: GroupProgress(group.newest, group.done, self._kept(group)) for group in used
        }
        last = used[0].id if used else None
        talks = tuple(reversed(self.talks))
        ways = [*self.paths.values(), *self.ended_paths]
        paths = tuple(tuple(reversed(path)) for path in ways if path)
        return RankDump(self.rank, seats, talks, last, self.first, paths, self._is_partial())

    def _is_partial(self) -> bool:
        """Whether nothing in it is complete although the rank called more than it contains."""
        if self.any_done:
            return False
        if self.entries:
            return self.has_gap or self.record != 0  # the very first record has number 0
        statuses = (self.status or {}).values()
        # torch writes these numbers as text in JSON.
        return any(int(status.get("last_enqueued_collective", -1)) > 0 for status in statuses)

    def _kept(self, group: _Open) -> tuple[Call, ...]:
        return tuple(reversed(group.calls[-KEPT - self.history :]))

    def _take(self, entry: Mapping[str, Any]) -> None:
        name, desc = entry["process_group"]
        group = self._group(name, desc)
        talks = bool(entry.get("is_p2p"))
        seq = entry["p2p_seq_id"] if talks else entry["collective_seq_id"]
        if type(seq) is not int:
            raise TypeError(f"the number of an operation is of type {type(seq).__name__}")
        self._take_record(entry.get("record_id"))
        if not talks and self.path_length:
            self._take_step(_text_of(entry.get("thread_id", "")), group.id.desc, seq)
        if not talks and seq <= group.done - self.history + 1:
            return  # old, and another operation of this kind is kept already
        backend, _, kind = _text_of(entry["profiling_name"]).partition(":")
        done = _is_done(entry, backend)
        self.any_done = self.any_done or done
        # A coalesced operation is an entry of its own, which comes last and so is read first. Its
        # parts have no state, so they take that of the whole.
        if kind.endswith("coalesced"):
            group.bundles[talks, seq] = done
        elif group.bundles:
            done = group.bundles.get((talks, seq), done)
        if talks:
            self._take_talk(group.id, kind, done)
        elif seq != group.oldest:  # further parts of a coalesced operation have the same number
            self._take_call(group, Call(seq, _op(kind, entry), _started(entry)), done)

    def _group(self, name: Any, desc: Any) -> _Open:
        if type(name) is not str or type(desc) is not str:
            raise TypeError("the name of a group is not text")
        group = self.groups.get((name, desc))
        if group is None:
            known = GroupId(_text_of(name), _text_of(desc), self._members(name))
            group = self.groups[name, desc] = _Open(known)
        return group

    def _members(self, name: str) -> tuple[int, ...]:
        members = self.members.get(name, ())
        place = bisect_left(members, self.rank)
        if members and members[place : place + 1] != (self.rank,):
            raise ValueError(f"it calls in group {name}, which rank {self.rank} is not in")
        return members

    def _take_record(self, record: Any) -> None:
        """Records have consecutive numbers. If one is missing, it is unknown what was called
        between its neighbours."""
        if type(record) is int:
            if self.record is not None and record != self.record - 1:
                # Calls before and after the gap are not neighbours, so every path ends here.
                self.has_gap = True
                self.ended_paths += self.paths.values()
                self.paths = {}
            self.record = record

    def _take_step(self, thread: str, desc: str, seq: int) -> None:
        path = self.paths.setdefault(thread, [])
        if not path or path[-1] != (desc, seq):  # parts of a coalesced operation share a number
            path.append((desc, seq))
            self.path_length -= 1

    def _take_call(self, group: _Open, call: Call, done: bool) -> None:
        group.newest = max(group.newest, call.seq)
        group.oldest = call.seq
        if not done:
            # Entries are read from newest to oldest, so the last assignment is the oldest call.
            self.first = group.id
        elif not group.done:
            group.done = call.seq
        group.calls.append(call)

    def _take_talk(self, group: GroupId, kind: str, done: bool) -> None:
        found = P2P.match(kind)
        if done or found is None:
            return
        peer = int(found[3])
        known = group.members
        # In a group with known members the peer is a rank in the group.
        peer = known[peer] if peer < len(known) else peer
        self.talks.append(PeerCall(group, found[1] == "send", peer))
        self.first = None  # the oldest pending call is a send or receive


def _is_done(entry: Mapping[str, Any], backend: str) -> bool:
    """Whether an operation is complete. Entries of gloo stay `scheduled` for ever, but are retired.

    Only an entry's own state counts. `pg_status` does not help: its last complete collective is the
    number of the last operation of any kind, and sends are counted separately.
    """
    return entry["state"] == "completed" or (backend == "gloo" and bool(entry.get("retired")))


def _text_of(found: Any) -> str:
    """A name, or a number that stands for one."""
    if type(found) not in (str, int):
        raise TypeError(f"a name is of type {type(found).__name__}")
    text = str(found)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a name of {len(text):,} letters")
    return text


def _op(kind: str, entry: Mapping[str, Any]) -> Op:
    inputs, outputs = entry.get("input_dtypes") or (), entry.get("output_dtypes") or ()
    dtypes = sorted({*_texts(inputs), *_texts(outputs)})
    return Op(
        kind, _sizes(entry.get("input_sizes")), _sizes(entry.get("output_sizes")), "/".join(dtypes)
    )


def _texts(found: Any) -> tuple[str, ...]:
    texts = tuple(found)
    if len(texts) > MOST_TENSORS or not all(type(one) is str for one in texts):
        raise TypeError("the types of an operation's tensors are no list of texts")
    return texts


def _sizes(sizes: Any) -> str:
    """Sizes as text, checked before they are printed: a pickle of a few bytes can contain nested
    lists that take for ever to print."""
    found = tuple(sizes or ())
    if len(found) > MOST_TENSORS:
        raise ValueError(f"an operation of {len(found):,} tensors")
    return ",".join(map(_size, found))


def _size(one: Any) -> str:
    if len(one) > MOST_DIMENSIONS or not all(type(size) is int for size in one):
        raise TypeError("the size of a tensor is no list of a few numbers")
    return "x".join(map(str, one)) or "scalar"


def _started(entry: Mapping[str, Any]) -> bool:
    return entry["state"] == "started" or bool(entry.get("time_discovered_started_ns"))


def _ranks(written: Any) -> tuple[int, ...]:
    """Ranks in torch's form `"[0, 1]"`."""
    return _read_ranks(written) if isinstance(written, str) else _as_ranks(written)


@lru_cache(maxsize=200_000)
def _read_ranks(written: str) -> tuple[int, ...]:
    """Cached, because all ranks of a group have the same text."""
    return _as_ranks(read_json(written)) if len(written) <= 9 * MOST_RANKS else _as_ranks(None)


def _as_ranks(found: Any) -> tuple[int, ...]:
    if type(found) not in (list, tuple) or len(found) > MOST_RANKS:
        raise ValueError("the ranks of a group are no list, or too many")
    if not all(type(rank) is int for rank in found):
        raise TypeError("the ranks of a group are no numbers")
    return tuple(sorted(found))

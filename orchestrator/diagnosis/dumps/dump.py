"""A flight recorder's dump of one rank, read safely and reduced to what a diagnosis needs.

torch writes dumps as pickle (`_dump_fr_trace`, and the NCCL watchdog) or JSON
(`_dump_fr_trace_json`). A pickle can run code, so only plain values are let through, and each is
checked before it is used: a list in the place of a name can take for ever to hash or to print. A
pickle that breaks its reader, as one that asks for gigabytes, is for `reading` to contain. A dump
does not say whose it is: its file's name does.
"""

import gzip
import io
import pickle
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from orchestrator.contract.read_json import read_json

KEPT = 64
"""Pending operations of one group that are kept; the oldest matter."""
HISTORY = 48
"""Complete operations of one group that are kept: what a rank usually calls tells who is odd."""
SHORTEST_PATH = 8
"""Of its calls in order, so many are kept of each rank, however little history is."""
OF_AN_IDLE_RANK = {"version", "pg_config"}
"""Keys that torch writes as well; as JSON it leaves `entries` out where there are none (2.13)."""
MOST_BYTES = 1 << 26
"""Of a dump, once it is unpacked; one of 2,000 operations with stacks has a twentieth of this."""
MOST_RANKS = 1 << 20
"""Of a job."""
MOST_CHARACTERS = 1_000
"""Of a name."""
MOST_DIMENSIONS = 64
MOST_TENSORS = 1 << 16
"""Of one operation: a coalesced one names all that it takes."""
GZIP = b"\x1f\x8b"
P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class Times(NamedTuple):
    """What tells which attempt of which job a dump is of."""

    since_s: float | None
    """When the oldest operation that it holds was called, by its host's clock; None: it holds
    none, or does not say."""
    until_s: float | None
    """And the newest."""
    written_s: float
    """When the file was written, which a copy may have changed."""
    world: int | None
    """Ranks of the job; None: it does not say."""


class Unreadable(ValueError):
    """A file that is no dump, or a damaged one."""


class Op(NamedTuple):
    """What a rank asks of a group; that of its peers must fit."""

    kind: str
    inputs: str
    outputs: str
    dtypes: str

    def fits(self, other: "Op") -> bool:
        """Whether two ranks may call these together."""
        if self.kind != other.kind or self.dtypes != other.dtypes:
            return False
        if self.kind in UNEVEN:
            return True
        return self.inputs == other.inputs and self.outputs == other.outputs

    def __str__(self) -> str:
        return f"{self.kind} {self.inputs}→{self.outputs} {self.dtypes}"


WORLD = "default_pg"
"""torch's name for the group of all ranks."""
UNEVEN = frozenset(
    {"all_to_all", "all_to_all_v_single", "scatter", "gather", "all_gather_v", "reduce_scatter_v"}
)
"""Where ranks may give tensors of different sizes."""
ONE_SIDED = frozenset({"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "scatter", "gather"})
"""Which may be complete for one rank while others still wait, as a broadcast is for its source."""


class Called(NamedTuple):
    seq: int
    op: Op
    started: bool


class Seat(NamedTuple):
    """Where a rank stands in one group."""

    entered: int
    """Number of the newest collective that it called."""
    done: int
    """Number of the newest that is complete; 0: none in the buffer."""
    calls: tuple[Called, ...]
    """What is pending, and the last ones that are complete; oldest first."""

    @property
    def pending(self) -> tuple[Called, ...]:
        return tuple(call for call in self.calls if call.seq > self.done)

    @property
    def behind(self) -> int:
        """How many it has done, whether they are in the buffer or not."""
        pending = self.pending
        return pending[0].seq - 1 if pending else self.entered


class GroupId(NamedTuple):
    name: str
    desc: str
    members: tuple[int, ...]
    """Ranks of the job; empty where the dump does not say, as gloo's do not."""


class Talk(NamedTuple):
    """A send or receive that is pending."""

    group: GroupId
    sends: bool
    peer: int
    """Rank in the job, or in the group where its members are not known."""


@dataclass(slots=True)
class RankDump:
    rank: int
    seats: dict[GroupId, Seat] = field(default_factory=dict)
    talks: tuple[Talk, ...] = ()
    last: GroupId | None = None
    """Whose operation it called last."""
    first: GroupId | None = None
    """Whose operation it called first of those that are pending; None: it sent or received."""
    paths: tuple[tuple[tuple[str, int], ...], ...] = ()
    """The last collectives of each thread in the order in which it called them: kind of group, and
    number there. All ranks that do the same work take the same paths; what a thread beside the main
    one calls, as to save, comes between the others' calls at another place on each rank. Where the
    dump leaves calls out, a path ends and the next begins."""
    partial: bool = False
    """It holds what was under way and nothing else, so it does not say which operations of a group
    are complete: what `onlyActive` asks a recorder for."""

    @property
    def waits(self) -> bool:
        return bool(self.talks) or any(seat.pending for seat in self.seats.values())


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise Unreadable(f"it wants to load {module}.{name}, which a dump never does")


def parse(data: bytes) -> Mapping[str, Any]:
    """The dump in `data`, pickle or JSON, packed by gzip or not.

    Raises:
        Unreadable: it is neither, or no dump.
    """
    if not data:
        raise Unreadable("it is empty")
    try:
        data = _unpacked(data) if data.startswith(GZIP) else data
        dump = read_json(data) if data[:1] == b"{" else _Plain(_at_once(data)).load()
    except Unreadable:
        raise
    except MemoryError as exc:
        raise Unreadable("it asks for more memory than a dump takes") from exc
    except Exception as exc:  # whatever can be wrong in a file that anybody may have written
        raise Unreadable(f"neither JSON nor a pickle: {exc}"[:MOST_CHARACTERS]) from exc
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise Unreadable("no dump of a flight recorder: it has no list of entries")
    if "entries" not in dump and not dump.keys() >= OF_AN_IDLE_RANK:
        raise Unreadable("no dump of a flight recorder: it has neither entries nor groups")
    return dump


def times_of(dump: Mapping[str, Any], written_s: float) -> Times:
    """Of a dump that `condense` took."""
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
    return Times(since, until, written_s, max(sizes, default=0) or None)


def _called_at(entry: Mapping[str, Any]) -> float | None:
    found = entry.get("time_created_ns")
    return found / 1e9 if type(found) is int and found > 0 else None


def _unpacked(data: bytes) -> bytes:
    """No more than a dump has: a few bytes may unpack to many gigabytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
        found = packed.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise Unreadable(f"it unpacks to more than {MOST_BYTES >> 20} MiB")
    return found


def _at_once(data: bytes) -> io.BufferedReader:
    """From a file that cannot be looked ahead in, an unpickler reads byte by byte."""
    return io.BufferedReader(io.BytesIO(data), len(data) + 1)


def condense(rank: int, dump: Mapping[str, Any], history: int = HISTORY) -> RankDump:
    """What matters of a dump; `history` complete operations of each group are kept, at least one.

    Raises:
        Unreadable: entries lack what every version of the recorder writes.
    """
    try:
        return _Condenser(rank, dump, history).result()
    except Exception as exc:  # whatever can be wrong in a file that anybody may have written
        raise Unreadable(f"its entries are not as torch writes them: {_words(exc)}") from exc


def _words(exc: Exception) -> str:
    """Of an error that may hold what the file says."""
    return f"{type(exc).__name__}: {exc}"[:MOST_CHARACTERS] if exc.args else type(exc).__name__


@dataclass(slots=True)
class _Open:
    """A group, as far as the entries were walked through."""

    id: GroupId
    newest: int = -1
    oldest: int = -1
    done: int = 0
    calls: list[Called] = field(default_factory=list)
    """Newest first."""
    bundles: dict[tuple[bool, int], bool] = field(default_factory=dict)
    """Of coalesced operations, which have no state of their own: whether the whole is done."""


class _Condenser:
    """Walks the entries from the newest to the oldest: what is old and done then costs little."""

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
        """By name and description: ids with their members take long to look up."""
        self.talks: list[Talk] = []
        self.first: GroupId | None = None
        self.paths: dict[str, list[tuple[str, int]]] = {}
        """Of each thread, newest first."""
        self.path_length = max(history, SHORTEST_PATH)
        """What is left to be taken of all of them."""
        self.ended_paths: list[list[tuple[str, int]]] = []
        """Older than a call that the dump leaves out; each newest first."""
        self.record: int | None = None
        """Number of the record that was taken before, which is the next newer one."""
        self.any_done = self.has_gap = False

    def result(self) -> RankDump:
        for entry in reversed(self.entries):
            self._take(entry)
        for group in self.groups.values():
            if not group.done and group.oldest > 0:
                group.done = group.oldest - 1  # a group's operations end in their order
        used = [group for group in self.groups.values() if group.newest >= 0]
        seats = {group.id: Seat(group.newest, group.done, self._kept(group)) for group in used}
        last = used[0].id if used else None
        talks = tuple(reversed(self.talks))
        ways = [*self.paths.values(), *self.ended_paths]
        paths = tuple(tuple(reversed(path)) for path in ways if path)
        return RankDump(self.rank, seats, talks, last, self.first, paths, self._is_partial())

    def _is_partial(self) -> bool:
        """Nothing in it is complete, and yet the rank called more than it holds."""
        if self.any_done:
            return False
        if self.entries:
            return self.has_gap or self.record != 0  # the first record of all has number 0
        statuses = (self.status or {}).values()
        # As JSON torch writes these numbers as text.
        return any(int(status.get("last_enqueued_collective", -1)) > 0 for status in statuses)

    def _kept(self, group: _Open) -> tuple[Called, ...]:
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
            return  # old, and its like is known
        backend, _, kind = _text_of(entry["profiling_name"]).partition(":")
        done = _is_done(entry, backend)
        self.any_done = self.any_done or done
        if kind.endswith("coalesced"):
            group.bundles[talks, seq] = done
        elif group.bundles:
            done = group.bundles.get((talks, seq), done)
        if talks:
            self._take_talk(group.id, kind, done)
        elif seq != group.oldest:
            self._take_call(group, Called(seq, _op(kind, entry), _started(entry)), done)

    def _group(self, name: Any, desc: Any) -> _Open:
        if type(name) is not str or type(desc) is not str:
            raise TypeError("the name of a group is no text")
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
        """Records have consecutive numbers: where one is left out, nothing tells what was called
        between its neighbours."""
        if type(record) is int:
            if self.record is not None and record != self.record - 1:
                self.has_gap = True
                self.ended_paths += self.paths.values()
                self.paths = {}
            self.record = record

    def _take_step(self, thread: str, desc: str, seq: int) -> None:
        path = self.paths.setdefault(thread, [])
        if not path or path[-1] != (desc, seq):  # parts of a coalesced one share a number
            path.append((desc, seq))
            self.path_length -= 1

    def _take_call(self, group: _Open, call: Called, done: bool) -> None:
        group.newest = max(group.newest, call.seq)
        group.oldest = call.seq
        if not done:
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
        peer = known[peer] if peer < len(known) else peer
        self.talks.append(Talk(group, found[1] == "send", peer))
        self.first = None


def _is_done(entry: Mapping[str, Any], backend: str) -> bool:
    """gloo's entries stay `scheduled` for ever; a retired one is over.

    An entry's state is as of the dump, and all that tells. `pg_status` does not: what it calls the
    last complete collective is the number of any last operation, and sends are counted apart.
    """
    return entry["state"] == "completed" or (backend == "gloo" and bool(entry.get("retired")))


def _text_of(found: Any) -> str:
    """A name, or a number in the place of one."""
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
    """Looked at before they are printed: lists that hold one list many times, which holds one list
    many times, and so on, take a few bytes in a pickle and for ever to print."""
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
    """`"[0, 1]"`, as torch writes them."""
    return _read_ranks(written) if isinstance(written, str) else _as_ranks(written)


@lru_cache(maxsize=200_000)
def _read_ranks(written: str) -> tuple[int, ...]:
    """Each text once: every rank of a group has the same."""
    return _as_ranks(read_json(written)) if len(written) <= 9 * MOST_RANKS else _as_ranks(None)


def _as_ranks(found: Any) -> tuple[int, ...]:
    if type(found) not in (list, tuple) or len(found) > MOST_RANKS:
        raise ValueError("the ranks of a group are no list, or too many")
    if not all(type(rank) is int for rank in found):
        raise TypeError("the ranks of a group are no numbers")
    return tuple(sorted(found))

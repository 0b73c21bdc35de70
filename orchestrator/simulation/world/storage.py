"""The shared file system: journal, fence and checkpoints. It may be slow, full or stale.

The real code writes and reads the lines of the journal. The lock on the journal is released when
its holder dies or, if the holder's host is cut off, when its lease expires. Reads of the fence are
always fresh, because NFS has close-to-open consistency. Other reads may be stale.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from msgspec import Struct

from orchestrator.contract.files.fence import Fence
from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.skipped_batches import Window, already_read
from orchestrator.errors import JobError
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Decided, Entry, Place, complete_length, parse, to_line
from orchestrator.journal.snapshot import Unfit, from_bytes, to_bytes
from orchestrator.journal.supervisor import NOTHING, Folded
from orchestrator.simulation.clock import Timeline
from orchestrator.simulation.world.network import STORAGE, Network

if TYPE_CHECKING:
    from orchestrator.simulation.processes.run_dir import StoredTurn

SNAPSHOT_LINES = 4
"""Lines of the journal between two snapshots; few, because leaders die often here."""
MAKER = "simulation"
LEASE_S = 45.0
"""Seconds after which a file server releases the lock of an unreachable host."""

Crash = Literal["before the line", "within the line", "after the line"]


class Crashed(BaseException):
    """The process died here; the first `lines` lines of its write are complete on disk."""

    def __init__(self, where: Crash, lines: int) -> None:
        super().__init__(where)
        self.lines = lines


@dataclass(slots=True)
class LeaderRecord:
    """`leader.json`, where agents find the leader."""

    launch: int
    restarts: int
    host: str
    port: int = 0
    over: bool = False


class Checkpoint(Struct, frozen=True):
    """A complete checkpoint with the data that its weights were trained on."""

    at: float
    step: int
    attempt: int
    batches: tuple[int, ...] = ()
    """Batches, in the order of the steps."""
    skipped: tuple[Window, ...] = ()
    bad_steps: tuple[int, ...] = ()
    """The last consecutive steps with a NaN loss."""


@dataclass(slots=True)
class Storage:
    timeline: Timeline
    network: Network
    journal: bytearray = field(default_factory=bytearray)
    entries: list[Entry] = field(default_factory=list)
    """Entries of the complete lines of the journal."""
    entries_end: int = 0
    snapshot: bytes = b""
    """The newest snapshot of the state that the journal gives."""
    fence: Fence | None = None
    leader_records: list[tuple[float, LeaderRecord]] = field(default_factory=list)
    """Each version of `leader.json` with the time of its write."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    reached: Reached | None = None
    """The last line of the metrics."""
    holder: str | None = None
    """Incarnation that holds the journal's lock."""
    holder_host: str = ""
    turn: "StoredTurn | None" = None
    """The holder of the lock that orders the agents without a leader."""
    settled_marks: set[str] = field(default_factory=set)
    """Marks of agents that found no work left."""
    folded: Run = field(default_factory=Run)
    num_folded: int = 0
    """Number of entries that `folded` includes."""
    full_until: float = 0.0
    slow_until: float = 0.0
    slow_s: float = 0.0
    stale_until: float = 0.0
    stale_s: float = 0.0

    def reachable_from(self, host: str) -> bool:
        return self.network.reaches(host, STORAGE)

    @property
    def full(self) -> bool:
        return self.timeline.now < self.full_until

    @property
    def delay(self) -> float:
        """Additional seconds of a write."""
        return self.slow_s if self.timeline.now < self.slow_until else 0.0

    def _read_time(self) -> float:
        now = self.timeline.now
        return now - self.stale_s if now < self.stale_until else now

    def read_leader_record(self) -> LeaderRecord | None:
        """What a host reads in `leader.json`; may be stale."""
        until = self._read_time()
        return next((w for at, w in reversed(self.leader_records) if at <= until), None)

    def newest_checkpoint(self, skip: Sequence[Window] = ()) -> Checkpoint | None:
        """The newest checkpoint that was not trained on data in `skip`, like `find_checkpoint`."""
        until = self._read_time()
        folders = {found.step: found for found in self.checkpoints if found.at <= until}
        fit = [
            found for found in folders.values() if not already_read(found.step, found.skipped, skip)
        ]
        return max(fit, key=lambda found: found.step, default=None)

    def check_write(self, host: str) -> None:
        """Raises OSError when `host` cannot write now."""
        if not self.reachable_from(host):
            raise OSError(errno.ESTALE, "the file server is unreachable")
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on device")

    def read_entries(self) -> Sequence[Entry]:
        """All entries. Each line is decoded once; an incomplete last line is ignored."""
        whole = complete_length(self.journal)
        if whole > self.entries_end:
            fresh = bytes(self.journal[self.entries_end : whole])
            self.entries += parse(fresh, len(self.entries))
            self.entries_end = whole
        return self.entries

    def fold(self) -> Run:
        """The state after all entries of the journal."""
        for entry in self.read_entries()[self.num_folded :]:
            self.folded, _ = step(self.folded, entry.event)
        self.num_folded = len(self.entries)
        return self.folded


class StoredJournal:
    """`journal.Journal` in memory, whose writer can die at any point of a write."""

    def __init__(
        self,
        storage: Storage,
        host: str,
        guard: Callable[[], None],
        on_release: Callable[[], None] = lambda: None,
    ) -> None:
        """`released`: called when the lock is released."""
        self.storage, self.host, self.guard = storage, host, guard
        self.on_release = on_release
        del storage.journal[complete_length(storage.journal) :]
        self.seq = entries[-1].seq if (entries := storage.read_entries()) else 0
        self.known = self._known()
        """State in the newest snapshot."""
        self.crash: tuple[int, Crash] | None = None
        """The line at which the writer dies, counted from here, and the place in the line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.on_release()

    @property
    def place(self) -> Place:
        return Place(lines=self.seq, offset=len(self.storage.journal))

    def after(self, place: Place) -> Sequence[Entry]:
        return self.storage.read_entries()[place.lines :]

    def remember(self, folded: Folded) -> None:
        if self.seq < self.known.place.lines + SNAPSHOT_LINES or not self.storage.reachable_from(
            self.host
        ):
            return
        self.guard()
        self.storage.snapshot = to_bytes(folded, MAKER, self._before)
        self.known = folded

    def _known(self) -> Folded:
        try:
            return from_bytes(self.storage.snapshot, MAKER, self._before)
        except Unfit:
            return NOTHING

    def _before(self, offset: int, length: int) -> bytes:
        return bytes(self.storage.journal[offset - length : offset])

    def extend(self, decided: Decided) -> tuple[Entry, ...]:
        self.guard()
        self.storage.check_write(self.host)
        entries = tuple(
            Entry(seq=seq, event=event, actions=actions)
            for seq, (event, actions) in enumerate(decided, self.seq + 1)
        )
        lines = [to_line(entry) for entry in entries]
        if self.crash is not None:
            number, where = self.crash
            if number < len(lines):
                self._crash(lines, number, where)
            self.crash = (number - len(lines), where)
        self.storage.journal += b"".join(lines)
        self.seq += len(entries)
        return entries

    def _crash(self, lines: Sequence[bytes], number: int, where: Crash) -> None:
        """Die at line `number` of a write. Bytes after a hole of zeros may be on disk, as after a
        crash of the host."""
        whole = number + (where == "after the line")
        self.storage.journal += b"".join(lines[:whole])
        if where == "within the line":
            line, behind = lines[number], b"".join(lines[number + 1 :])
            kept = 1 + (self.seq + number + 1) * 37 % (len(line) - 1)
            hole = bytes(len(line) - kept) + behind if behind and kept % 2 else b""
            self.storage.journal += line[:kept] + hole
        raise Crashed(where, whole)


def decode_all(journal: bytes) -> tuple[Entry, ...]:
    """All entries of a journal, decoded again. Raises AssertionError if a line is damaged."""
    try:
        return tuple(parse(journal[: complete_length(journal)]))
    except JobError as exc:
        raise AssertionError(f"the journal is damaged: {exc}") from exc

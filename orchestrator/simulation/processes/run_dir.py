"""The run directory of real leaders and agents in the simulated shared storage."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ndctl.rank.fence import GivenUp
from orchestrator.contract.files.fence import Fence
from orchestrator.contract.files.leader_file import Term
from orchestrator.errors import InUse
from orchestrator.failover.journal_watch import Seen, seen_by
from orchestrator.failover.run_dir_watch import Loss
from orchestrator.failover.turns import TURN_S
from orchestrator.host_strikes import Line
from orchestrator.job.state import Run
from orchestrator.journal.supervisor import Folded
from orchestrator.leader.storage import Watch
from orchestrator.simulation.world.storage import LeaderRecord, StoredJournal

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess

LOCK_POLL_S = 1.0


class NoLossWatch:
    """No fault of a scenario removes the run directory."""

    lost: Loss | None = None

    def look(self) -> None:
        pass


class StoredRunDir:
    """An `AgentStorage`, a `LeaderStorage` and a `FailoverStorage`."""

    def __init__(self, process: "AgentProcess") -> None:
        self.process = process
        self.storage = process.world.storage
        self.host = process.host.name
        self.watch: Watch = NoLossWatch()
        self.journal: StoredJournal | None = None
        """The journal of a leader."""

    def _check_read(self) -> None:
        if not self.storage.reachable_from(self.host):
            raise OSError("the file server is unreachable")

    # Reads of an agent

    def leader_of(self, term: Term) -> Mapping[str, Any]:
        record = (
            self.storage.read_leader_record() if self.storage.reachable_from(self.host) else None
        )
        if record is None or (record.launch, record.restarts) != (term.launch, term.restarts):
            return {}
        return {"over": True} if record.over else {"address": record.host, "port": record.port}

    def leader_holds_journal(self) -> bool:
        self._check_read()
        return not self.process.world.lock_is_free

    # Writes of a leader

    def check_leader(self, name: str) -> None:
        self._check_read()
        now = self.storage.fence
        if now is not None and now.leader != name:
            raise GivenUp("another leader has taken over")

    def write_fence(self, fence: Fence) -> None:
        world = self.process.world
        self.storage.check_write(self.host)
        world.laws.check_fence_write(fence.leader)
        self.storage.fence = fence

    def announce(self, term: Term, address: str, port: int, name: str) -> None:
        self._announce(LeaderRecord(term.launch, term.restarts, self.host, port))

    def announce_end(self, term: Term) -> None:
        self._announce(LeaderRecord(term.launch, term.restarts, self.host, over=True))

    def _announce(self, record: LeaderRecord) -> None:
        self.storage.check_write(self.host)
        self.storage.leader_records.append((self.process.world.timeline.now, record))

    def write_snapshot(self, folded: Folded, guard: Callable[[], None]) -> None:
        assert self.journal is not None
        self.journal.remember(folded)

    def write_trace(self, attempt: int, name: str, data: bytes) -> None:
        pass

    def record_strike(self, path: Path, line: Line) -> None:
        self.process.world.strikes.append(line)

    def record_speed(self, run: Run) -> None:
        pass

    # Failover

    def read_fence(self) -> Fence | None:
        self._check_read()
        return self.storage.fence

    def take_over(self, name: str) -> None:
        self.storage.check_write(self.host)
        former = self.storage.fence
        self.storage.fence = Fence(leader=name, attempt=former.attempt if former else 0)
        self.process.took_over(name)

    async def check_writable(self) -> None:
        """Awaited by the worker, because it takes virtual time."""
        await asyncio.sleep(self.storage.delay)
        self.storage.check_write(self.host)

    def open_turn(self, mark: str) -> "StoredTurn":
        self._check_read()
        return StoredTurn(self.process, mark)

    def journal_size(self) -> int:
        self._check_read()
        return len(self.storage.journal)

    def follow(self, host: str) -> "StoredFollowing":
        return StoredFollowing(self)

    async def open_journal(self, name: str, patience_s: float) -> StoredJournal:
        """Awaited by the worker, because it takes virtual time."""
        now = self.process.loop.time
        until = now() + patience_s
        while True:
            self._check_read()
            if self.process.world.acquire_lock(self.process):
                break
            if now() > until:
                raise InUse("the journal is held by another process", fix="wait")
            await asyncio.sleep(LOCK_POLL_S)
        guard = partial(self.check_leader, name)
        on_release = partial(self.process.world.release_lock, self.process)
        self.journal = StoredJournal(self.storage, self.host, guard, on_release)
        return self.journal


@dataclass(slots=True, eq=False)
class StoredTurn:
    """An `AnyTurn`: the holder's death releases it. If its host lost power, the file server
    keeps it until the host is back."""

    process: "AgentProcess"
    mark: str
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.process.loop.time()

    def has_come(self) -> bool:
        storage = self.process.storage.storage
        if not storage.reachable_from(self.process.host.name):
            return False  # the real call blocks
        if storage.turn is None or storage.turn is self:
            storage.turn = self
            return True
        return self.process.loop.time() - self.begun >= TURN_S

    def settle(self) -> None:
        storage = self.process.storage.storage
        if storage.reachable_from(self.process.host.name) and not storage.full:
            storage.settled_marks.add(self.mark)

    def is_settled(self) -> bool:
        storage = self.process.storage.storage
        if not storage.reachable_from(self.process.host.name):
            raise OSError("the file server is unreachable")
        return self.mark in storage.settled_marks

    def close(self) -> None:
        storage = self.process.storage.storage
        if storage.turn is self:
            storage.turn = None


class StoredFollowing(Struct, frozen=True):
    """A `Follows`. All hosts share one fold of the journal, because each would compute the same."""

    run_dir: StoredRunDir

    def look(self) -> Seen:
        self.run_dir._check_read()
        storage, world = self.run_dir.storage, self.run_dir.process.world
        run, entries = storage.fold(), storage.read_entries()
        last = entries[-1].event if entries else None
        led = not world.lock_is_free
        return seen_by(self.run_dir.host, run, len(entries), last, led=led)

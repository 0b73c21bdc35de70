"""Checkpoints in this host's memory, as its agent uses them."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ndctl.rank.priority import give_way
from orchestrator.agent.memory.client import Damaged, PeerClient, Stopped
from orchestrator.agent.memory.held import HeldCopies
from orchestrator.agent.memory.server import PeerServer
from orchestrator.agent.memory.slots import MemorySlots, paths
from orchestrator.contract.files.checkpoint_names import Made, SkippedCheckpoint
from orchestrator.contract.memory.peers import CopyPlan, HostMemory, Peer, SlotsOffered, Wanted
from orchestrator.contract.memory.slot_file import (
    NOT_SENT,
    SENDING,
    SENT,
    Label,
    label_of,
    mark_of,
    set_mark,
)
from orchestrator.contract.messages.agent_protocol import Claim, MemoryUse, Start
from orchestrator.contract.messages.rank_messages import CopiesEnded, CopyReady
from orchestrator.job_secret import JobSecret

log = logging.getLogger(__name__)

THREADS = 4
"""Slots that are sent, or fetched, at once. One thread encrypts 1 to 2 GB per second."""
COMPLAIN_S = 60.0
"""Least time between two log lines about partners."""


class Where(Struct, frozen=True, kw_only=True):
    """What the server and the client of an agent need to know."""

    address: str
    folder: Path
    secret: JobSecret
    claim: Claim


class HostCopies:
    def __init__(self, where: Where) -> None:
        self.where = where
        self.slots, self.held = MemorySlots(), HeldCopies()
        self.client = PeerClient(where.secret, where.claim)
        self.server: PeerServer | None = None
        self.port = 0
        self.pool: ThreadPoolExecutor | None = None
        self.start: Start | None = None
        self.sending: set[tuple[int, Made]] = set()
        """Ranks whose slot is being sent, and the slot."""
        self.copied_at: float | None = None
        """When partners last got a slot (monotonic)."""
        self.complained = -COMPLAIN_S
        self.damaged: list[SkippedCheckpoint] = []
        """Copies on partners that had changed."""
        self._lock = threading.Lock()
        self._still = threading.Condition(self._lock)

    # Called on the agent's event loop

    async def offer(self, attempt: int) -> SlotsOffered:
        """What this host has, and where."""
        try:
            await asyncio.to_thread(self._open)
        except OSError as exc:
            log.warning("no copies of checkpoints in memory on this host: %s", exc)
        labels = await asyncio.to_thread(self._labels)
        host = self.where.claim.host
        return SlotsOffered(attempt=attempt, host=host, port=self.port, slots=labels)

    async def prepare(self, start: Start, copies: CopyPlan) -> HostMemory:
        """The memory for the ranks of an attempt, which holds what they resume from. If there is
        none, they train without."""
        await asyncio.to_thread(self._stop_sending)
        self.start = start
        self.client.forget(copies.partners)
        self.client.limit.bytes_per_s = copies.bytes_per_s
        self.held.allow(copies.holds, start.attempt)
        try:
            memory, known = self.slots.of_attempt(start, copies), len(self.damaged)
        except OSError as exc:
            why = f"its agent has no memory for them: {exc.strerror}"
            log.warning("no checkpoints in memory on this host: %s", why)
            return HostMemory(lineage=start.lineage, slots=(), why=why)
        await asyncio.gather(*(asyncio.to_thread(self._fetch, one, start) for one in copies.wanted))
        held = [file for file, _ in self.held.labels()]
        others = paths((*self.slots.others, *held))
        damaged = tuple(self.damaged[known:])
        return replace(memory, others=others, damaged=damaged, held_bytes=self.held.num_bytes)

    def ready(self, ready: CopyReady) -> None:
        """A rank has completed a slot of which its partners must have copies. The rank repeats the
        message until the slot is marked."""
        start = self.start
        if start is None or start.copies is None or ready.attempt != start.attempt:
            return
        local = ready.rank - start.node_rank * start.ranks_per_host
        file = self.slots.file(local, ready.slot)
        made = Made(step=ready.step, attempt=ready.attempt)
        if file is None or (ready.rank, made) in self.sending:
            return
        with self._lock:
            self.sending.add((ready.rank, made))
        if self.pool is None:
            self.pool = ThreadPoolExecutor(THREADS, "memory-copies", initializer=give_way)
        partners = start.copies.partners[: ready.copies]
        self.pool.submit(self._send, file, ready.rank, made, partners)

    def ended(self, ended: CopiesEnded) -> None:
        """The ranks of this attempt keep nothing any more, so copies of others are of no use."""
        if self.start is not None and ended.attempt == self.start.attempt:
            self.held.give_back()
            self.slots.drop_others()

    def use(self) -> MemoryUse:
        copied = self.copied_at
        return MemoryUse(
            host=self.where.claim.host,
            num_bytes=self.slots.num_bytes + self.held.num_bytes,
            held=sum(1 for _ in self.held.labels()),
            copied_s=None if copied is None else time.monotonic() - copied,
            damaged=len(self.damaged),
        )

    def close(self) -> None:
        """Called last. Nothing in memory is left."""
        self._stop_sending()
        if self.pool is not None:
            self.pool.shutdown()
        if self.server is not None:
            self.server.close()
        self.client.forget(())
        self.held.close()
        self.slots.close()

    # In threads

    def _open(self) -> None:
        if self.server is None:
            claim = self.where.claim
            server = PeerServer(self, self.where.secret, claim.launch)
            self.port = server.open(self.where.address, self.where.folder)
            self.server = server

    def _labels(self) -> tuple[Label, ...]:
        return tuple(label for _, label in self._all())

    def _all(self) -> Iterator[tuple[int, Label]]:
        """The complete slots and copies on this host."""
        yield from self.slots.labels()
        yield from self.held.labels()

    def _stop_sending(self) -> None:
        self.client.stop()
        with self._still:
            self._still.wait_for(lambda: not self.sending)

    def _send(self, file: int, rank: int, made: Made, partners: tuple[Peer, ...]) -> None:
        try:
            label = label_of(file)
            if label is None or label.made != made or mark_of(file) != SENDING:
                return  # a message that was repeated, and comes late
            sent = self._sent_to_all(file, label, partners)
            if sent is not None:
                set_mark(file, SENT if sent else NOT_SENT)
            if sent:
                self.copied_at = time.monotonic()
        finally:
            with self._still:
                self.sending.discard((rank, made))
                self._still.notify_all()

    def _sent_to_all(self, file: int, label: Label, partners: tuple[Peer, ...]) -> bool | None:
        """None: the attempt ended meanwhile."""
        sent = True
        for peer in partners:
            try:
                self.client.put(file, label, peer)
            except Stopped:
                return None
            except OSError as exc:
                if self.client.stopped.is_set():
                    return None
                sent = False
                self._complain(label, peer, exc)
        return sent

    def _complain(self, label: Label, peer: Peer, exc: OSError) -> None:
        now = time.monotonic()
        if now - self.complained >= COMPLAIN_S:
            self.complained = now
            log.warning(
                "no copy of step %d of rank %d on %s: %s",
                label.made.step, label.rank, peer.host, exc or type(exc).__name__,
            )  # fmt: skip

    def _fetch(self, wanted: Wanted, start: Start) -> None:
        if any(label == wanted.label for _, label in self.slots.labels()):
            return
        if wanted.label.ranks == start.nodes * start.ranks_per_host:
            local_rank = wanted.rank - start.node_rank * start.ranks_per_host
            file = self.slots.to_overwrite(local_rank, wanted.label.made)
        else:
            file = self.slots.another()
        for peer in wanted.peers:
            try:
                self.client.get(wanted, peer, file)
            except OSError as exc:
                if isinstance(exc, Damaged):
                    name = f"step-{wanted.label.made.step} in memory on {peer.host}"
                    self.damaged.append(SkippedCheckpoint(name, str(exc)))
                log.warning(
                    "failed to fetch step %d of rank %d from %s: %s",
                    wanted.label.made.step, wanted.rank, peer.host, exc or type(exc).__name__,
                )  # fmt: skip
                continue
            log.info(
                "fetched step %d of rank %d from %s",
                wanted.label.made.step, wanted.rank, peer.host,
            )  # fmt: skip
            return

    # As the server's store

    def find(self, label: Label) -> int | None:
        for file, found in self._all():
            if found == label:
                return os.dup(file)
        return None

    def begin(self, label: Label, num_bytes: int) -> int:
        return self.held.begin(label, num_bytes)

    def commit(self, file: int, header_bytes: int) -> None:
        if self.held.commit(file, header_bytes):
            self.slots.drop_others()

    def end(self, file: int) -> None:
        self.held.end(file)

"""Checkpoints in this host's memory, as its agent uses them."""

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.agent.memory.client import PeerClient, Stopped
from orchestrator.agent.memory.held import HeldCopies
from orchestrator.agent.memory.server import PeerServer
from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.files.checkpoint_names import Made
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
from orchestrator.contract.messages.rank_messages import CopyReady
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
        """The memory for the ranks of an attempt, which holds what they resume from. Raises
        OSError."""
        await asyncio.to_thread(self._stop_sending)
        self.start = start
        self.client.forget(copies.partners)
        self.client.limit.bytes_per_s = copies.bytes_per_s
        self.held.allow(copies.holds, start.attempt)
        memory = replace(self.slots.of_attempt(start, copies), held_bytes=self.held.num_bytes)
        if copies.wanted:
            first = start.node_rank * start.ranks_per_host
            fetches = (
                asyncio.to_thread(self._fetch, one, one.rank - first) for one in copies.wanted
            )
            await asyncio.gather(*fetches)
        return memory

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
            self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="memory-copies")
        partners = start.copies.partners[: ready.copies]
        self.pool.submit(self._send, file, ready.rank, made, partners)

    def use(self) -> MemoryUse:
        copied = self.copied_at
        return MemoryUse(
            host=self.where.claim.host,
            num_bytes=self.slots.num_bytes + self.held.num_bytes,
            held=sum(1 for _ in self.held.labels()),
            copied_s=None if copied is None else time.monotonic() - copied,
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
        return tuple(label for _, label in (*self.slots.labels(), *self.held.labels()))

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

    def _fetch(self, wanted: Wanted, local_rank: int) -> None:
        if any(label == wanted.label for _, label in self.slots.labels()):
            return
        file = self.slots.to_overwrite(local_rank, wanted.label.made)
        for peer in wanted.peers:
            try:
                self.client.get(wanted, peer, file)
            except OSError as exc:
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
        for file, found in (*self.slots.labels(), *self.held.labels()):
            if found == label:
                return os.dup(file)
        return None

    def begin(self, label: Label, num_bytes: int) -> int:
        return self.held.begin(label, num_bytes)

    def commit(self, file: int, header_bytes: int) -> None:
        self.held.commit(file, header_bytes)

    def end(self, file: int) -> None:
        self.held.end(file)

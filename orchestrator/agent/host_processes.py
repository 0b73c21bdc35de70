"""The processes of one host as its agent sees them: an interface, and its real implementation.

The real processes are torchrun and its ranks, with what the kernel and the logs say about them.
"""

import asyncio
import functools
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from orchestrator.agent.allreduce_check import check_fabric
from orchestrator.agent.attempt import Attempt, with_reading
from orchestrator.agent.evidence.evidence_collector import (
    Found,
    gather,
    gather_last,
    keep,
    look_back,
    read_stopped,
    with_last_lines,
)
from orchestrator.agent.memory.host_copies import HostCopies
from orchestrator.agent.processes.fork_server_client import Standby
from orchestrator.agent.processes.kept_ranks import KeptRanks
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.agent.program import Program
from orchestrator.agent.rank_socket import free_port, listen
from orchestrator.contract.codec import encode
from orchestrator.contract.files.env import MEMORY, WAITS
from orchestrator.contract.files.profile_request import (
    ProfileRequest,
    path_of,
    write_request,
)
from orchestrator.contract.memory.peers import SlotsOffered
from orchestrator.contract.messages.agent_protocol import (
    Checked,
    CheckFabric,
    Evidence,
    MemoryUse,
    Prepare,
    RankDigest,
    Start,
)
from orchestrator.contract.messages.events import HostStopped, RankExited
from orchestrator.contract.messages.rank_messages import Beat, CopiesEnded, CopyReady, Datagram
from orchestrator.contract.spec.failures import Reading
from orchestrator.diagnosis.logs.readings import read_words
from orchestrator.health.host_probes import Probe
from orchestrator.posix.run_with_timeout import within
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

LEARN_S = 1.0
"""Seconds between two looks for the list of modules."""


class HostAttempt(Protocol):
    """The ranks of one attempt on one host."""

    start: Start
    stopping: bool
    """The agent has begun to stop the ranks."""

    async def begin(self) -> None:
        """Start the ranks. Raises OSError when torchrun cannot be started."""

    async def wait(self) -> tuple[list[RankExited], HostStopped]:
        """Called after `begin`. Returns when no process is left: the exits that were not reported
        yet, and the end of the attempt on this host."""

    async def stop(
        self, grace_s: float, *, keep_ranks: bool = False, in_memory: bool = False
    ) -> None:
        """Send SIGTERM to every rank, and SIGKILL to what is left after the grace.

        With `keep_ranks` the ranks leave the attempt instead, if they can, and their processes wait
        for the next one. With `in_memory` the signal is `STOP_IN_MEMORY`.
        """

    def save(self) -> None:
        """Have the ranks save a checkpoint after the present step."""

    def hear(self, datagram: Datagram) -> RankExited | None:
        """Called with each message of a rank. Returns the report to send if the rank failed."""

    def has_trained(self, rank: int) -> bool:
        """Whether the rank has reported a loss."""

    def failures(self) -> list[RankExited]:
        """The ranks that have failed so far. The agent reports them again when it reconnects."""

    def digest(self) -> tuple[RankDigest, ...]:
        """The state of each rank, with the steps since the last call. Called at each pulse."""

    def still_in(self, limit_s: float) -> float:
        """Seconds until all ranks have made no progress for `limit_s`."""

    def excuse(self, seconds: float) -> None:
        """Do not count `seconds` as a standstill, because the agent itself did not run."""

    async def read(self, exited: RankExited) -> RankExited:
        """`exited` with the rank's last log lines and their failure class. Called before the exit
        is reported."""

    async def read_launcher(self, stopped: HostStopped) -> HostStopped:
        """`stopped` with the failure class of torchrun's output."""

    async def read_words(self, words: str) -> Reading | None:
        """The failure class of an exception's text."""

    async def find_evidence(self, timeout_s: float, *, hang: bool) -> Found:
        """Stacks, flight recorder dumps and probes. Without `hang` the ranks will go on, so none is
        put at risk."""

    def ask_for_profile(self, rank: int, request: str, steps: int) -> None:
        """Ask a rank for a profile of its next steps. It answers with `Profiled`. Raises
        OSError."""

    async def last_evidence(self, timeout_s: float) -> Evidence:
        """The last collectives that the ranks called. Called when no process is left."""

    async def look_back(self, timeout_s: float) -> Found:
        """The result of a check of the host. Called when a rank has ended."""

    async def keep(self, found: Found) -> None:
        """Write `found` into the traces. Called after it was reported."""


class Processes(Protocol):
    """Starts the attempts of one host. An agent has one, and calls it on its event loop."""

    async def open(self, hear: Callable[[Datagram], None]) -> None:
        """Called once, first. From then on `hear` is called with each message of a rank."""

    async def close(self) -> None:
        """Called last, when no attempt runs."""

    def attempt(self, start: Start) -> HostAttempt:
        """Called for each order to start."""

    async def prepare(self, order: Prepare) -> None:
        """Start ranks that wait for an attempt, unless some wait already. Called while no attempt
        runs here. Raises OSError."""

    async def check_fabric(self, order: CheckFabric) -> Checked:
        """Take part in the all-reduce check of all hosts. Always returns a result."""

    async def offer_slots(self, attempt: int) -> SlotsOffered:
        """Which checkpoints are in this host's memory. Called between two attempts."""

    def memory_use(self) -> MemoryUse | None:
        """Checkpoints in this host's memory. Called at each pulse."""

    def free_port(self) -> int:
        """A port for torchrun's rendezvous. Raises OSError."""

    def die(self) -> None:
        """Kill this agent, and its ranks with it. Called when a drill orders that."""


class TorchrunAttempt(Attempt):
    """The HostAttempt of real agents: an Attempt with its fork server and evidence collectors."""

    def __init__(self, start: Start, host: "HostProcesses") -> None:
        super().__init__(start, host.place, host.clock)
        self.host = host
        self.last = host.newest
        """The attempt before this one, until its ranks have joined this one or have ended."""
        self.program: Program | None = None
        """Given if the ranks run the user's own program."""
        if start.run is not None:
            self.program = Program(start, self.log_dir, host.hear, self.running, self.active)

    async def begin(self) -> None:
        environ = dict(self.host.environ)
        if self.start.copies is not None:
            memory = await self.host.memory().prepare(self.start, self.start.copies)
            environ[MEMORY] = json.dumps(encode(memory))
        if not await self._joined(environ):
            await self.launch(self.host.standby, environ)
        if self.program is not None:
            self.program.begin()

    async def _joined(self, environ: Mapping[str, str]) -> bool:
        """Whether ranks that have left the last attempt take part in this one. Otherwise they are
        gone on return."""
        # Without this each attempt would keep all earlier ones in memory.
        last, self.last = self.last, None
        former = await self.host.waiting_ranks(last)
        if former is None:
            return False
        if former.can_join(self.start) and not self.stopping:
            try:
                self.join(former, environ)
                return True
            except OSError as exc:
                log.warning("starting the ranks again: failed to have them join: %s", exc)
        self.torchrun = self.kept = None
        await former.end()
        await self._until_gone()
        return False

    async def wait(self) -> tuple[list[RankExited], HostStopped]:
        try:
            return await super().wait()
        finally:
            if self.program is not None:
                self.program.close()

    def hear(self, datagram: Datagram) -> RankExited | None:
        exited = super().hear(datagram)
        match datagram:
            case Beat() if self.program is not None:
                self.program.heard(datagram)
            case CopyReady():
                self.host.memory().ready(datagram)
            case CopiesEnded() if self.start.copies is not None:
                self.host.memory().ended(datagram)
            case _:
                pass
        return exited

    async def read(self, exited: RankExited) -> RankExited:
        if exited.stopped:  # its log explains nothing; the traces keep it
            return await read_stopped(self, exited)
        return await with_last_lines(self, exited)

    async def read_launcher(self, stopped: HostStopped) -> HostStopped:
        return await with_reading(stopped, self.start.classes)

    async def read_words(self, words: str) -> Reading | None:
        return await within(None, read_words, words, self.start.classes)

    async def find_evidence(self, timeout_s: float, *, hang: bool) -> Found:
        return await gather(self, timeout_s, self.host.probe(), hang=hang)

    def ask_for_profile(self, rank: int, request: str, steps: int) -> None:
        path = path_of(self.place.socket, self.start.attempt, rank)
        write_request(path, ProfileRequest(id=request, steps=steps))

    async def last_evidence(self, timeout_s: float) -> Evidence:
        return await gather_last(self, timeout_s)

    async def look_back(self, timeout_s: float) -> Found:
        return await look_back(self, timeout_s, self.host.probe())

    async def keep(self, found: Found) -> None:
        await keep(self, found)


class HostProcesses:
    """The Processes of real agents."""

    def __init__(
        self,
        place: HostPlace,
        environ: Mapping[str, str],
        clock: Clock,
        standby: Standby,
        probe: Callable[[], Probe],
        memory: Callable[[], HostCopies],
    ) -> None:
        """
        Args:
            memory: creates what serves checkpoints in memory. It is called when it is needed.
        """
        self.place, self.environ, self.clock = place, environ, clock
        self.standby, self.probe, self.memory = standby, probe, functools.cache(memory)
        self.newest: TorchrunAttempt | None = None
        self.preparing: asyncio.Task[None] | None = None
        self.waiting: KeptRanks | None = None
        """Ranks that no attempt has had yet."""
        self.socket: asyncio.DatagramTransport | None = None
        self.hear: Callable[[Datagram], None] = lambda datagram: None
        self.learning: asyncio.Task[None] | None = None

    async def open(self, hear: Callable[[Datagram], None]) -> None:
        self.hear = hear
        self.socket = await listen(self.place.socket, self._heard)
        await self.standby.prepare()
        if self.place.learned is not None and not self.place.learned.exists():
            self.learning = asyncio.create_task(self._learn(self.place.learned))

    def _heard(self, datagram: Datagram) -> None:
        newest = self.newest
        if newest is not None and newest.kept is not None:
            datagram = newest.kept.as_in(newest.start, datagram)
        self.hear(datagram)

    async def _learn(self, file: Path) -> None:
        """Once the ranks have written which modules they import, here or on another host, import
        them before the next attempt."""
        while not await within(None, file.exists):
            await asyncio.sleep(LEARN_S)
        await self.standby.learn()

    async def close(self) -> None:
        if self.learning is not None:
            self.learning.cancel()
        await self.standby.close()
        if self.memory.cache_info().currsize:
            await asyncio.to_thread(self.memory().close)
        if self.socket is not None:
            self.socket.close()

    def attempt(self, start: Start) -> HostAttempt:
        self.newest = TorchrunAttempt(start, self)
        return self.newest

    async def waiting_ranks(self, last: TorchrunAttempt | None) -> KeptRanks | None:
        """Ranks that wait for an attempt: those that no attempt has had yet, or those that have
        left `last`. From then on they belong to the caller."""
        if self.preparing is not None:
            await asyncio.wait([self.preparing])
        waiting, self.waiting = self.waiting, None
        if waiting is None and last is not None and last.all_left.is_set():
            return last.kept
        return waiting

    async def prepare(self, order: Prepare) -> None:
        newest = self.newest
        left = newest is not None and newest.all_left.is_set()
        if left or self.waiting is not None or self.preparing is not None:
            return
        self.preparing = asyncio.create_task(self._prepare(order))
        try:
            await asyncio.shield(self.preparing)
        finally:
            self.preparing = None

    async def _prepare(self, order: Prepare) -> None:
        start = Start(
            attempt=order.attempt,
            node_rank=0,
            nodes=1,
            ranks_per_host=order.ranks_per_host,
            master_address=self.place.address,
            master_port=0,
            config=order.config,
            drills=(),
            keep_ranks=True,
        )
        attempt = Attempt(start, self.place, self.clock)
        await attempt.launch(self.standby, {**self.environ, WAITS: "1"})
        self.waiting = attempt.kept

    async def check_fabric(self, order: CheckFabric) -> Checked:
        return await check_fabric(order, self.place, self.standby, self.environ, self.clock)

    async def offer_slots(self, attempt: int) -> SlotsOffered:
        return await self.memory().offer(attempt)

    def memory_use(self) -> MemoryUse | None:
        return self.memory().use() if self.memory.cache_info().currsize else None

    def free_port(self) -> int:
        return free_port(self.place.address)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

"""`HostAttempt` and `Processes` of a simulated host, through which the real agent runs ranks."""

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from orchestrator.agent.evidence.evidence_collector import Found
from orchestrator.agent.host_processes import HostAttempt
from orchestrator.contract.memory.peers import CopyPlan, SlotsOffered
from orchestrator.contract.memory.slot_file import Label
from orchestrator.contract.messages.agent_protocol import (
    Checked,
    CheckFabric,
    Evidence,
    MemoryUse,
    Prepare,
    RankDigest,
    Start,
)
from orchestrator.contract.messages.events import EvidenceGathered, HostStopped, RankExited
from orchestrator.contract.messages.rank_messages import Datagram
from orchestrator.contract.spec.failures import Reading
from orchestrator.health.host_probes import HostProbe
from orchestrator.simulation.world.host_memory import Copy
from orchestrator.simulation.world.ranks import HostRanks

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess

GATHER_S = 1.0
LOOK_BACK_S = 0.1
CHECK_TAKES_S = 2.0
FETCH_S = 4.0
DAMAGED = 0.05
"""Part of the copies that have a changed bit."""


class SimulatedAttempt:
    """A `HostAttempt` around the ranks of the simulated host."""

    def __init__(self, process: "AgentProcess", start: Start) -> None:
        self.process, self.start = process, start
        self.stopping = False
        self.ranks: HostRanks | None = None
        self.ended: asyncio.Future[HostStopped] = process.loop.create_future()

    async def begin(self) -> None:
        number = re.sub(r"\D", "", self.start.config.rpartition("/")[2])
        order = replace(self.start, config=number)
        if self.stopping:
            self._never_began(order)
            return
        copies = order.copies or CopyPlan()
        holds = {rank // order.ranks_per_host for rank in copies.holds}
        self.process.memory.allow(holds, order.attempt)
        if copies.wanted:
            await self._fetch(copies)
        if self.stopping:
            self._never_began(order)
            return
        self.ranks = self.process.world.start_ranks(self.process, order)

    def _never_began(self, order: Start) -> None:
        stopped = HostStopped(attempt=order.attempt, host=self.process.host.name, finished=False)
        self.ended.set_result(stopped)

    async def _fetch(self, copies: CopyPlan) -> None:
        """Fetch the slots that this host lacks. A partner may be gone by now, or have a damaged
        copy, which ranks pass over."""
        process, world = self.process, self.process.world
        await asyncio.sleep(FETCH_S * world.random.random())
        memory = process.memory
        same = copies.wanted[0].label.ranks == self.start.nodes * self.start.ranks_per_host
        # The slots of a host are one copy here, which comes once.
        for wanted in copies.wanted[:1] if same else copies.wanted:
            if self._copy(memory.complete if same else memory.all(), wanted.label) is not None:
                continue
            for peer in wanted.peers:
                there = world.memory_reached_from(process.host.name, peer.host)
                found = None if there is None else self._copy(there.all(), wanted.label)
                if found is not None and world.random.random() >= DAMAGED:
                    memory.put(found) if same else memory.others.append(found)
                    break

    def _copy(self, copies: Sequence[Copy], label: Label) -> Copy | None:
        """The slots of a host whose ranks include that of this label."""
        size = self.start.ranks_per_host
        return next((copy for copy in copies if label in copy.labels(size)), None)

    async def wait(self) -> tuple[list[RankExited], HostStopped]:
        return [], await self.ended

    def save(self) -> None:
        if self.ranks is not None and not self.stopping:
            self.ranks.training.save_requested = True

    async def stop(
        self, grace_s: float, *, keep_ranks: bool = False, in_memory: bool = False
    ) -> None:
        self.stopping = True
        if self.ranks is None:
            return
        if grace_s:
            self.ranks.stop(grace_s, in_memory=in_memory)
        else:
            self.ranks.kill()

    def hear(self, datagram: Datagram) -> RankExited | None:
        return None

    def has_trained(self, rank: int) -> bool:
        return self.ranks is not None and self.ranks.training.has_stepped

    def failures(self) -> list[RankExited]:
        return [] if self.ranks is None else list(self.ranks.reports)

    def digest(self) -> tuple[RankDigest, ...]:
        return () if self.ranks is None else self.ranks.digest()

    def still_in(self, limit_s: float) -> float:
        return math.inf

    def excuse(self, seconds: float) -> None:
        pass

    async def read(self, exited: RankExited) -> RankExited:
        return exited

    async def read_launcher(self, stopped: HostStopped) -> HostStopped:
        return stopped

    async def read_words(self, words: str) -> Reading | None:
        return None

    async def find_evidence(self, timeout_s: float, *, hang: bool) -> Found:
        found = self._nothing() if self.ranks is None else self.ranks.evidence()
        await asyncio.sleep(GATHER_S)
        return Found(evidence=found, ended={}, probe=HostProbe())

    def ask_for_profile(self, rank: int, request: str, steps: int) -> None:
        pass  # no person asks in a simulation

    async def last_evidence(self, timeout_s: float) -> Evidence:
        await asyncio.sleep(GATHER_S)
        return self._nothing()

    async def look_back(self, timeout_s: float) -> Found:
        await asyncio.sleep(LOOK_BACK_S)
        return Found(evidence=self._nothing(), ended={}, probe=HostProbe())

    async def keep(self, found: Found) -> None:
        pass

    def _nothing(self) -> Evidence:
        host, attempt = self.process.host.name, self.start.attempt
        return Evidence(event=EvidenceGathered(attempt=attempt, host=host, ranks=()))


class SimulatedProcesses:
    """The `Processes` of a simulated host."""

    def __init__(self, process: "AgentProcess") -> None:
        self.process = process

    async def open(self, hear: Callable[[Datagram], None]) -> None:
        pass

    async def close(self) -> None:
        pass

    def attempt(self, start: Start) -> HostAttempt:
        self.process.attempt = SimulatedAttempt(self.process, start)
        return self.process.attempt

    async def prepare(self, order: Prepare) -> None:
        pass  # ranks of a simulated host start at once

    async def check_fabric(self, order: CheckFabric) -> Checked:
        world, host = self.process.world, self.process.host
        await asyncio.sleep(CHECK_TAKES_S)
        unreachable = tuple(name for name in order.hosts if not world.reaches_agent(host, name))
        return Checked(
            check=order.check,
            host=host.name,
            state="waited" if unreachable else "ok",
            waited_for=unreachable,
        )

    async def offer_slots(self, attempt: int) -> SlotsOffered:
        process = self.process
        size = process.world.scenario.ranks_per_host
        labels = (label for copy in process.memory.all() for label in copy.labels(size))
        return SlotsOffered(attempt=attempt, host=process.host.name, port=1, slots=(*labels,))

    def memory_use(self) -> MemoryUse | None:
        return None

    def free_port(self) -> int:
        return 29_500

    def die(self) -> None:
        self.process.die()

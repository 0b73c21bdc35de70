"""A job that trains in virtual time: ranks send heartbeats, the agent of each host sends a digest
to the leader each second, and at once when its ranks make no progress. Digests arrive late."""

import heapq
import math
from dataclasses import dataclass
from random import Random

from ndctl.rank.phases import Phase
from orchestrator.agent.evidence.rank_progress import Pace, still_in
from orchestrator.contract.messages.agent_protocol import PULSE_S, RankDigest
from orchestrator.contract.messages.events import HangDetected
from orchestrator.contract.messages.rank_messages import Beat
from orchestrator.detect.heartbeat_monitor import HeartbeatMonitor

MARGIN_S = 0.02
"""How much longer than the limit an agent waits before it sends a digest early."""


@dataclass
class Host:
    rank: int
    pace: Pace
    step: int = 0
    phase: Phase = "init"
    heard: float = 0.0

    def beat(self, step: int, phase: Phase, now: float) -> None:
        beat = Beat(attempt=1, rank=self.rank, step=step, phase=phase)
        self.pace.beat(self.step, self.phase, beat, now)
        self.step, self.phase, self.heard = step, phase, now

    def digest(self, now: float) -> RankDigest:
        return RankDigest(
            rank=self.rank,
            pid=1,
            step=self.step,
            phase=self.phase,
            age_s=now - self.heard,
            still_s=self.pace.still(now, 0.0),
            loss=2.0,
            tokens_per_second=None,
            steps=self.pace.take(),
        )


@dataclass
class VirtualRanks:
    """One rank per host. The caller sends the heartbeats and lets time pass."""

    watch: HeartbeatMonitor
    hosts: int
    random: Random
    latency_s: float = 0.0
    """A digest takes at most this long to arrive."""
    check_s: float | None = None
    """Time between two checks of the leader; None checks each time a digest arrives."""
    hang: tuple[float, HangDetected] | None = None
    """When the first hang was detected, and its event."""
    now: float = 0.0
    sent: int = 0

    def __post_init__(self) -> None:
        self.ranks = [Host(rank, Pace(0.0, 0.0)) for rank in range(self.hosts)]
        self.due = [PULSE_S * self.random.random() for _ in self.ranks]
        self.in_transit: list[tuple[float, int, RankDigest]] = []
        self.check_at = math.inf if self.check_s is None else self.check_s * self.random.random()

    def beat(self, rank: int, step: int, phase: Phase = "train") -> None:
        self.ranks[rank].beat(step, phase, self.now)

    def all_beat(self, step: int, phase: Phase = "train") -> None:
        for rank in range(self.hosts):
            self.beat(rank, step, phase)

    def run_to(self, until: float) -> None:
        """Let time pass; no rank sends a heartbeat until then."""
        quiet = min(rank.pace.since for rank in self.ranks) + self.watch.limit("train")
        arrives = self.in_transit[0][0] if self.in_transit else math.inf
        if until < min(*self.due, arrives, self.check_at, quiet):
            self.now = until
            return
        while True:
            sends, rank = min((self._next_send(rank), rank) for rank in range(self.hosts))
            arrives = self.in_transit[0][0] if self.in_transit else math.inf
            first = min(sends, arrives, self.check_at)
            if first > until:
                break
            self.now = first
            if first == arrives:
                self.watch.observe([heapq.heappop(self.in_transit)[2]], self.now)
            elif first == sends:
                self._send(rank)
            if first == self.check_at or (self.check_s is None and first == arrives):
                self._check()
        self.now = until

    def _next_send(self, rank: int) -> float:
        still = still_in([self.ranks[rank].pace], self.watch.limit("train"), self.now)
        return min(self.due[rank], max(self.now, self.now + still + MARGIN_S))

    def _send(self, rank: int) -> None:
        late = self.latency_s * self.random.random()
        heapq.heappush(
            self.in_transit, (self.now + late, self.sent, self.ranks[rank].digest(self.now))
        )
        self.sent += 1
        self.due[rank] = self.now + PULSE_S

    def _check(self) -> None:
        if self.check_s is not None:
            self.check_at += self.check_s
        found = self.watch.hang(self.now)
        if found is not None and self.hang is None:
            self.hang = (self.now, found)

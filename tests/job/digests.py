"""A job that trains in virtual time, as its leader hears of it: ranks beat, an agent a host sends a
digest each second, and at once when its ranks stand still; digests take their time to arrive."""

import heapq
import math
from dataclasses import dataclass
from random import Random

from orchestrator.agent.evidence.rank_progress import Pace, still_in
from orchestrator.contract.messages.agent_protocol import PULSE_S, RankDigest
from orchestrator.contract.messages.events import HangDetected
from orchestrator.contract.messages.rank_messages import Beat
from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.detect.heartbeat_monitor import HeartbeatMonitor

MARGIN_S = 0.02
"""What an agent waits longer than the limit."""


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
            memory_bytes=None,
            steps=self.pace.take(),
        )


@dataclass
class Line:
    """One rank per host. The caller says what the ranks do, and lets time pass."""

    watch: HeartbeatMonitor
    hosts: int
    random: Random
    latency_s: float = 0.0
    """A digest takes up to so long to arrive."""
    look_s: float | None = None
    """Between two looks of the leader; None looks at the worst moments, when something came."""
    hang: tuple[float, HangDetected] | None = None
    """The first that was seen, and when."""
    now: float = 0.0
    sent: int = 0

    def __post_init__(self) -> None:
        self.ranks = [Host(rank, Pace(0.0, 0.0)) for rank in range(self.hosts)]
        self.due = [PULSE_S * self.random.random() for _ in self.ranks]
        self.coming: list[tuple[float, int, RankDigest]] = []
        self.look_at = math.inf if self.look_s is None else self.look_s * self.random.random()

    def beat(self, rank: int, step: int, phase: Phase = "train") -> None:
        self.ranks[rank].beat(step, phase, self.now)

    def all_beat(self, step: int, phase: Phase = "train") -> None:
        for rank in range(self.hosts):
            self.beat(rank, step, phase)

    def run_to(self, until: float) -> None:
        """No rank says anything until then."""
        quiet = min(rank.pace.since for rank in self.ranks) + self.watch.limit("train")
        arrives = self.coming[0][0] if self.coming else math.inf
        if until < min(*self.due, arrives, self.look_at, quiet):
            self.now = until
            return
        while True:
            sends, rank = min((self._sends(rank), rank) for rank in range(self.hosts))
            arrives = self.coming[0][0] if self.coming else math.inf
            first = min(sends, arrives, self.look_at)
            if first > until:
                break
            self.now = first
            if first == arrives:
                self.watch.observe([heapq.heappop(self.coming)[2]], self.now)
            elif first == sends:
                self._send(rank)
            if first == self.look_at or (self.look_s is None and first == arrives):
                self._look()
        self.now = until

    def _sends(self, rank: int) -> float:
        still = still_in([self.ranks[rank].pace], self.watch.limit("train"), self.now)
        return min(self.due[rank], max(self.now, self.now + still + MARGIN_S))

    def _send(self, rank: int) -> None:
        late = self.latency_s * self.random.random()
        heapq.heappush(self.coming, (self.now + late, self.sent, self.ranks[rank].digest(self.now)))
        self.sent += 1
        self.due[rank] = self.now + PULSE_S

    def _look(self) -> None:
        if self.look_s is not None:
            self.look_at += self.look_s
        found = self.watch.hang(self.now)
        if found is not None and self.hang is None:
            self.hang = (self.now, found)

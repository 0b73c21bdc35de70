"""Detectors: what the heartbeats of one attempt amount to.

A `Watch` lives as long as an attempt and holds what the journal need not: the last word of every
rank. Its clock is the leader's monotonic one, passed in; ages are measured by each agent on its own
host, so clocks that differ between hosts do no harm.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from orchestrator.contract.events import Health
from orchestrator.contract.phases import Phase
from orchestrator.contract.protocol import RankDigest

HANG_STEPS = 10.0
"""A hang is this many median steps without progress …"""
HANG_FLOOR_S = 10.0
"""… but at least this long."""
CHECKPOINT_LIMIT_S = 900.0
"""The blocking part of a save, and evaluation, on a slow file system."""
EXIT_LIMIT_S = 120.0
"""From the last step to the process's end: torch waits for the other ranks on its way out."""
SLOW_STEPS = 3.0
SLOW_FLOOR_S = 2.0
RECORD_EVERY_S = 30.0
"""Between two `StepReached` of one attempt."""
STEPS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Limits:
    hang: float | None
    """Seconds; None adapts to the observed step time."""
    init: float


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    loss: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Hang:
    phase: Phase
    step: int
    stalled_s: float
    limit_s: float
    behind: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HealthChange:
    rank: int
    health: Health
    age_s: float


@dataclass(slots=True)
class _RankWatch:
    step: int = -1
    phase: Phase = "init"
    heard: float = 0.0
    moved: float = 0.0
    """When step or phase last changed."""
    health: Health = "ok"
    ended: bool = False


class Watch:
    def __init__(self, ranks: Iterable[int], limits: Limits, now: float) -> None:
        self.limits = limits
        self.ranks = {rank: _RankWatch(heard=now, moved=now) for rank in ranks}
        self.durations: deque[float] = deque(maxlen=STEPS_KEPT)
        self.step = -1
        self.stepped: float | None = None
        """When the job's newest step was first reported."""
        self.moved = now
        self.recorded = float("-inf")

    def observe(self, digests: Iterable[RankDigest], now: float) -> Progress | None:
        """Take in a digest; the progress to record, now and then."""
        newest: RankDigest | None = None
        first = self.step
        for digest in digests:
            rank = self.ranks.get(digest.rank)
            if rank is None:
                continue
            rank.heard, rank.ended = max(rank.heard, now - digest.age_s), digest.ended
            if (digest.step, digest.phase) != (rank.step, rank.phase):
                rank.step, rank.phase = digest.step, digest.phase
                rank.moved = now - digest.still_s
                self.moved = max(self.moved, rank.moved)
            elif digest.phase == "init":
                # Before the first step a rank says something only when it gets on: packing data.
                self.moved = max(self.moved, rank.heard)
            if digest.phase != "init" and digest.step > first:
                newest, first = digest, digest.step
        return self._stepped(newest, now) if newest is not None else None

    def _stepped(self, digest: RankDigest, now: float) -> Progress | None:
        """Steps between two digests share their time evenly."""
        at = now - digest.still_s
        # A loss that is not finite is told as none; a second step is progress all the same.
        done = digest.loss is not None or self.stepped is not None
        if self.stepped is not None:
            steps = digest.step - self.step
            each = max(0.0, at - self.stepped) / steps  # two hosts' ages may differ a little
            self.durations.extend([each] * min(steps, STEPS_KEPT))
        self.step, self.stepped = digest.step, at
        if not done or now - self.recorded < RECORD_EVERY_S:
            return None
        self.recorded = now
        return Progress(digest.step, digest.loss, digest.tokens_per_second)

    @property
    def step_s(self) -> float | None:
        """Median of the last steps' durations."""
        return statistics.median(self.durations) if self.durations else None

    def limit(self, phase: Phase) -> float:
        """Seconds without progress that are too many in `phase`."""
        match phase:
            case "init" | "compile":
                return self.limits.init
            case "checkpoint" | "eval":
                return max(CHECKPOINT_LIMIT_S, self.limits.hang or 0.0)
            case "exit":
                return EXIT_LIMIT_S
            case "train":
                if self.limits.hang is not None:
                    return self.limits.hang
                if self.step_s is None:
                    return self.limits.init
                return max(HANG_FLOOR_S, HANG_STEPS * self.step_s)

    def hang(self, now: float) -> Hang | None:
        """Whether nobody has moved for longer than the most patient phase allows."""
        phases: set[Phase] = {rank.phase for rank in self.ranks.values() if not rank.ended}
        if not phases:
            return None
        phase = max(sorted(phases), key=self.limit)
        stalled, limit = now - self.moved, self.limit(phase)
        if stalled <= limit:
            return None
        first = max(rank.step for rank in self.ranks.values())
        behind = tuple(
            number
            for number, rank in sorted(self.ranks.items())
            if rank.step < first and not rank.ended
        )
        return Hang(phase, max(0, first), stalled, limit, behind)

    def health_changes(self, now: float) -> tuple[HealthChange, ...]:
        """Ranks whose health has another name than when last asked."""
        changes = []
        step_s = self.step_s
        slow = max(SLOW_FLOOR_S, SLOW_STEPS * (step_s or 0.0))
        limits = {phase: self.limit(phase) for phase in get_args(Phase)}
        for number, rank in sorted(self.ranks.items()):
            if rank.ended:
                continue
            age, limit = now - rank.heard, limits[rank.phase]
            health: Health = "ok"
            if age > limit / 2:
                health = "silent"
            elif rank.phase == "train" and step_s is not None and age > slow:
                health = "slow"
            if health != rank.health:
                rank.health = health
                changes.append(HealthChange(number, health, age))
        return tuple(changes)

"""Detectors: what the heartbeats of one attempt amount to.

A `Watch` lives as long as an attempt and holds what the journal need not: the last word of every
rank. Its clock is the leader's monotonic one, passed in; ages are measured by each agent on its own
host, so clocks that differ between hosts do no harm.

A standstill is judged as of when every host has told of its ranks, never by silence: digests that
are late, or a leader that does not get to read them, make no hang. Agents tell at once when their
ranks have stood still for as long as `still_s`, so that this costs no second.
"""

import heapq
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from orchestrator.contract.messages.agent_protocol import RankDigest, StepTimes
from orchestrator.contract.messages.events import (
    CheckpointSlow,
    HangDetected,
    HangOver,
    Health,
    HealthChanged,
    Notice,
    Span,
    StepReached,
)
from orchestrator.contract.messages.rank_phase import Phase

HANG_STEPS = 5.0
"""A hang is this many median steps without progress …"""
HANG_SPREAD = 3.0
"""… and so many times the longest of the last steps: where they vary it takes more …"""
OUTLIERS = 64
"""… though of so many the longest does not count: ranks that wait while a single one saves or
compiles take that for a step …"""
HANG_SLACK_S = 0.5
"""… and this for what interrupts any process now and then. The digest that tells of it, and the
leader's look, take less than another half second."""
FEW_STEPS = 8
"""With fewer than these known a hang is …"""
FIRST_STEPS = 10.0
FIRST_FLOOR_S = 10.0
"""… so many times the longest of them, and at least this."""
UNHEARD_S = 10.0
"""Nobody's word is waited for longer than this."""
CHECKPOINT_LIMIT_S = 900.0
"""The blocking part of a save, evaluation, and what else is written, on a slow file system; and
steps under the profiler."""
EXIT_LIMIT_S = 120.0
"""From the last step to the process's end: torch waits for the other ranks on its way out."""
SILENT_FLOOR_S = 5.0
SLOW_STEPS = 3.0
SLOW_FLOOR_S = 2.0
ALIVE_BY_WORDS: tuple[Phase, ...] = ("init", "eval")
"""In these a rank speaks only when it gets on: it has packed more data, or begins a batch."""
RECORD_EVERY_S = 30.0
"""Between two `StepReached` of one attempt."""
STEPS_KEPT = 256
SLOW_SAVE = 3.0
"""A checkpoint is slow when it blocks for this many times the median of those before it …"""
SLOW_SAVE_FLOOR_S = 10.0
"""… and at least for this long: digests come each second, so shorter times are inexact."""
FEW_SAVES = 3
"""With fewer checkpoints known, none is called slow."""
SAVES_KEPT = 32


@dataclass(frozen=True, slots=True)
class Limits:
    hang: float | None
    """Seconds; None adapts to the observed step time."""
    init: float
    checkpoint: float | None = None
    """Seconds; None for what a slow file system may take."""


@dataclass(slots=True)
class _RankWatch:
    step: int = -1
    phase: Phase = "init"
    heard: float = 0.0
    told: float = 0.0
    """When a digest last told of it …"""
    still: float = 0.0
    """… and how long it had stood still by then."""
    health: Health = "ok"
    ended: bool = False


class Watch:
    def __init__(self, attempt: int, ranks: Iterable[int], limits: Limits, now: float) -> None:
        self.attempt = attempt
        self.limits = limits
        self.ranks = {rank: _RankWatch(heard=now, told=now) for rank in ranks}
        self.durations: deque[float] = deque(maxlen=STEPS_KEPT)
        """Of the last steps, less what has a phase of its own."""
        self.adapted = limits.init
        """Of a training step; until one is known, that of the start."""
        self.step = -1
        self.trained = False
        """A step of the attempt was reported before the newest."""
        self.recorded = float("-inf")
        self.save_begun = now
        self.saves: deque[float] = deque(maxlen=SAVES_KEPT)
        """Seconds for which the last checkpoints blocked rank 0."""
        self.slow_saves: list[CheckpointSlow] = []
        """Not yielded yet."""

    def observe(self, digests: Iterable[RankDigest], now: float) -> StepReached | None:
        """Take in a digest; the progress to record, now and then."""
        newest: RankDigest | None = None
        first = self.step
        for digest in digests:
            rank = self.ranks.get(digest.rank)
            if rank is None:
                continue
            if digest.rank == 0:
                self._time_save(rank, digest, now)
            rank.heard = max(rank.heard, now - digest.age_s)
            rank.step, rank.phase, rank.ended = digest.step, digest.phase, digest.ended
            by_words = digest.phase in ALIVE_BY_WORDS
            rank.told, rank.still = now, digest.age_s if by_words else digest.still_s
            if digest.phase != "init" and digest.step > first:
                newest, first = digest, digest.step
        return self._stepped(newest, now) if newest is not None else None

    def _time_save(self, before: _RankWatch, digest: RankDigest, now: float) -> None:
        """Rank 0 enters the phase `checkpoint` before it saves and leaves it after."""
        changed = now - digest.still_s
        if before.phase != "checkpoint" and digest.phase == "checkpoint":
            self.save_begun = changed
        elif before.phase == "checkpoint" and digest.phase != "checkpoint":
            took_s = changed - self.save_begun
            usual_s = statistics.median(self.saves) if len(self.saves) >= FEW_SAVES else math.inf
            if took_s > max(SLOW_SAVE * usual_s, SLOW_SAVE_FLOOR_S):
                slow = CheckpointSlow(
                    attempt=self.attempt, step=before.step, took_s=took_s, usual_s=usual_s
                )
                self.slow_saves.append(slow)
            self.saves.append(took_s)

    def _stepped(self, digest: RankDigest, now: float) -> StepReached | None:
        if digest.steps is not None:
            self.durations.extend(_lengths(digest.steps))
            self.adapted = self._adapt()
        # A loss that is not finite is told as none; a second step is progress all the same.
        done = digest.loss is not None or self.trained
        self.step, self.trained = digest.step, True
        if not done or now - self.recorded < RECORD_EVERY_S:
            return None
        self.recorded = now
        return StepReached(
            attempt=self.attempt,
            step=digest.step,
            loss=digest.loss,
            tokens_per_second=digest.tokens_per_second,
        )

    @property
    def step_s(self) -> float | None:
        """Median of the last steps' durations."""
        return statistics.median(self.durations) if self.durations else None

    def limit(self, phase: Phase) -> float:
        """Seconds without progress that are too many in `phase`."""
        match phase:
            case "init" | "compile":
                return self.limits.init
            case "checkpoint" if self.limits.checkpoint is not None:
                return self.limits.checkpoint
            case "checkpoint" | "eval" | "write" | "profile":
                return max(CHECKPOINT_LIMIT_S, self.limits.hang or 0.0)
            case "exit":
                return EXIT_LIMIT_S
            case "train":
                if self.limits.hang is not None:
                    return self.limits.hang
                return self.adapted

    def _adapt(self) -> float:
        """The limit within a training step, by the steps before it."""
        number = len(self.durations)
        longest = heapq.nlargest(1 + number // OUTLIERS, self.durations)[-1]
        if number < FEW_STEPS:
            return max(FIRST_FLOOR_S, FIRST_STEPS * longest)
        steps = max(HANG_STEPS * statistics.median(self.durations), HANG_SPREAD * longest)
        return steps + HANG_SLACK_S

    def hang(self, now: float) -> HangDetected | None:
        """Whether nobody has moved for longer than the most patient phase allows."""
        ranks = [rank for rank in self.ranks.values() if not rank.ended]
        shortest = min(self.limit(phase) for phase in get_args(Phase))
        if not ranks or any(_standstill(rank, now) <= shortest for rank in ranks):
            return None
        phase = max(sorted({rank.phase for rank in ranks}), key=self.limit)
        limit = self.limit(phase)
        if min(_standstill(rank, now) for rank in ranks) <= limit:
            return None
        # A leader that stood still itself reads digests before its watch is given the time without
        # that pause: such a digest seems to come from later than now.
        stalled = min(rank.still + max(0.0, now - rank.told) for rank in ranks)
        first = max(rank.step for rank in self.ranks.values())
        behind = tuple(
            number
            for number, rank in sorted(self.ranks.items())
            if rank.step < first and not rank.ended
        )
        return HangDetected(
            attempt=self.attempt,
            phase=phase,
            step=max(0, first),
            stalled_s=stalled,
            limit_s=limit,
            behind=behind,
        )

    def hang_over(
        self, hang: HangDetected, digests: Iterable[RankDigest], now: float
    ) -> HangOver | None:
        """Whether a rank of these digests moves again, so that `hang` is over."""
        for digest in digests:
            rank = self.ranks.get(digest.rank)
            if rank is None or rank.ended or rank.step < 0:
                continue
            if _standstill(rank, now) <= hang.limit_s:
                return HangOver(
                    attempt=self.attempt, rank=digest.rank, step=digest.step, phase=digest.phase
                )
        return None

    def tell_soon(self) -> None:
        """The next step is recorded at once."""
        self.recorded = float("-inf")

    def changes(self, now: float) -> tuple[Notice, ...]:
        """What a person wants to see and no decision depends on, since this was last asked."""
        slow_saves, self.slow_saves = self.slow_saves, []
        return (*slow_saves, *self._health_changes(now))

    def _health_changes(self, now: float) -> tuple[HealthChanged, ...]:
        """Ranks whose health has another name than when last asked, by that name."""
        changed: dict[Health, dict[int, float]] = {}
        step_s = self.step_s
        slow = max(SLOW_FLOOR_S, SLOW_STEPS * (step_s or 0.0))
        limits = {phase: self.limit(phase) for phase in get_args(Phase)}
        for number, rank in sorted(self.ranks.items()):
            if rank.ended:
                continue
            age, limit = now - rank.heard, limits[rank.phase]
            health: Health = "ok"
            if age > max(SILENT_FLOOR_S, limit if rank.phase == "train" else limit / 2):
                health = "silent"
            elif rank.phase == "train" and step_s is not None and age > slow:
                health = "slow"
            if health != rank.health:
                rank.health = health
                changed.setdefault(health, {})[number] = age
        return tuple(
            HealthChanged(
                attempt=self.attempt,
                ranks=_spans(ages),
                health=health,
                age_s=max(ages.values()),
            )
            for health, ages in changed.items()
        )


def _spans(ranks: Iterable[int]) -> tuple[Span, ...]:
    """Of ranks in their order."""
    found: list[Span] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return tuple(found)


def _standstill(rank: _RankWatch, now: float) -> float:
    """How long it is known to have stood still; of one that never came up, since the start."""
    since = now - rank.told
    heard = rank.step >= 0 and since <= UNHEARD_S
    return rank.still if heard else rank.still + since


def _lengths(steps: StepTimes) -> list[float]:
    """Of the steps between two digests, of which the longest ones are known, and the mean."""
    told = (*steps.next_s, steps.longest_s)
    rest = steps.count - len(told)
    others = max(0.0, steps.total_s - sum(told)) / rest if rest > 0 else 0.0
    return [*[others] * max(0, min(rest, STEPS_KEPT - len(told))), *told]

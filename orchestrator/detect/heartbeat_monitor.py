"""Detects hangs, late heartbeats and slow checkpoints from the heartbeats of one attempt.

A `HeartbeatMonitor` lives as long as an attempt and holds what the journal does not need: the last
heartbeat of every rank. Its clock is the leader's monotonic one, passed in. Ages are measured by
each agent on its own host, so differences between the hosts' clocks do not matter.

A hang is judged at a time up to which every host has reported, and never by silence: digests that
arrive late, or that the leader reads late, cause no hang. Agents report at once when their ranks
have stood still for `still_s`, so this costs no time.
"""

import heapq
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from msgspec import Struct

from ndctl.rank.phases import Phase
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

HANG_STEPS = 5.0
"""A hang is this many median step times without progress."""
HANG_SPREAD = 3.0
"""It is also this many times the longest of the last steps, because step times may vary."""
OUTLIERS = 64
"""Of this many steps the longest is ignored: ranks that wait while one rank saves or compiles count
the time as a step."""
HANG_SLACK_S = 0.5
"""Seconds added for interruptions that any process has now and then. The digest that reports it and
the leader's check take less than another half second."""
FEW_STEPS = 8
"""With fewer known steps than this, the two limits below apply."""
FIRST_STEPS = 10.0
FIRST_FLOOR_S = 10.0
"""A hang is this many times the longest known step, and at least `FIRST_FLOOR_S`."""
UNHEARD_S = 10.0
"""Upper limit of how long the report of a host is awaited."""
CHECKPOINT_LIMIT_S = 900.0
"""Limit for the blocking part of a save, evaluation and other files on a slow file system, and for
steps under the profiler."""
EXIT_LIMIT_S = 120.0
"""From the last step to the end of the process: torch waits for the other ranks when it exits."""
SILENT_FLOOR_S = 5.0
SLOW_STEPS = 3.0
SLOW_FLOOR_S = 2.0
ALIVE_BY_WORDS: tuple[Phase, ...] = ("init", "eval")
"""Phases in which a rank reports only progress: it packed more data, or starts a batch."""
RECORD_EVERY_S = 30.0
"""Seconds between two `StepReached` of one attempt."""
STEPS_KEPT = 256
SLOW_SAVE = 3.0
"""A checkpoint is slow if it blocks for this many times the median of the previous ones."""
SLOW_SAVE_FLOOR_S = 10.0
"""It must also block for this long: digests come each second, so shorter times are inexact."""
FEW_SAVES = 3
"""With fewer known checkpoints, none counts as slow."""
SAVES_KEPT = 32


class Limits(Struct, frozen=True):
    hang: float | None
    """Seconds; None adapts to the observed step time."""
    init: float
    checkpoint: float | None = None
    """Seconds; None: the default for a slow file system."""


@dataclass(slots=True)
class _RankWatch:
    step: int = -1
    phase: Phase = "init"
    heard: float = 0.0
    told: float = 0.0
    """When a digest last reported the rank."""
    still: float = 0.0
    """How long the rank had stood still by then."""
    health: Health = "ok"
    ended: bool = False


class HeartbeatMonitor:
    def __init__(self, attempt: int, ranks: Iterable[int], limits: Limits, now: float) -> None:
        self.attempt = attempt
        self.limits = limits
        self.ranks = {rank: _RankWatch(heard=now, told=now) for rank in ranks}
        self.durations: deque[float] = deque(maxlen=STEPS_KEPT)
        """Durations of the last steps, without other phases."""
        self.adapted = limits.init
        """Time limit of a training step; before the first step, that of the start."""
        self.step = -1
        self.trained = False
        """A step of the attempt was reported earlier than the newest one."""
        self.recorded = float("-inf")
        self.save_begun = now
        self.saves: deque[float] = deque(maxlen=SAVES_KEPT)
        """Seconds for which the last checkpoints blocked rank 0."""
        self.slow_saves: list[CheckpointSlow] = []
        """Notices that were not returned yet."""

    def observe(self, digests: Iterable[RankDigest], now: float) -> StepReached | None:
        """Process digests. Returns progress to record, at intervals."""
        newest: RankDigest | None = None
        first = self.step
        for digest in digests:
            rank = self.ranks.get(digest.rank)
            if rank is None:  # a rank of an attempt with another number of ranks
                continue
            if digest.rank == 0:
                self._time_save(rank, digest, now)
            # A digest that was delayed must not make the rank look older than a later one did.
            rank.heard = max(rank.heard, now - digest.age_s)
            rank.step, rank.phase, rank.ended = digest.step, digest.phase, digest.ended
            # During start-up a rank reports only when it advances, so its last report counts as
            # progress. Elsewhere it reports although it may stand still.
            by_words = digest.phase in ALIVE_BY_WORDS
            rank.told, rank.still = now, digest.age_s if by_words else digest.still_s
            # Steps during `init` are not new: after a resume, a rank reports the checkpoint's step.
            if digest.phase != "init" and digest.step > first:
                newest, first = digest, digest.step
        return self._stepped(newest, now) if newest is not None else None

    def _time_save(self, before: _RankWatch, digest: RankDigest, now: float) -> None:
        """Rank 0 enters the phase `checkpoint` before a save and leaves it afterwards."""
        # Digests come only now and then, so the time of the change is computed from the agent's
        # clock.
        changed = now - digest.still_s
        if before.phase != "checkpoint" and digest.phase == "checkpoint":
            self.save_begun = changed
        elif before.phase == "checkpoint" and digest.phase != "checkpoint":
            took_s = changed - self.save_begun
            # Until a few saves are known, none is slow.
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
        # A loss that is not finite is reported as None, as is the loss of the checkpoint's step
        # before any training. Only a second step without a loss is certainly progress, in a later
        # digest, or in this one if the agent has timed it: a short program may report all its steps
        # in one.
        done = digest.loss is not None or digest.steps is not None or self.trained
        self.step, self.trained = digest.step, True
        # A line for each step would make the journal of a job of weeks too long to fold.
        if not done or now - self.recorded < RECORD_EVERY_S:
            return None
        self.recorded = now
        return StepReached(
            attempt=self.attempt,
            step=digest.step,
            loss=digest.loss,
            tokens_per_second=digest.tokens_per_second,
        )

    def all_run(self) -> bool:
        """Whether every rank was heard, and none has ended."""
        return all(rank.step >= 0 and not rank.ended for rank in self.ranks.values())

    def ages(self, now: float) -> list[float]:
        """Seconds since each rank that still runs was last heard."""
        return [max(0.0, now - rank.heard) for rank in self.ranks.values() if not rank.ended]

    @property
    def step_s(self) -> float | None:
        """Median duration of the last steps."""
        return statistics.median(self.durations) if self.durations else None

    def limit(self, phase: Phase) -> float:
        """Seconds without progress that count as a hang in `phase`."""
        match phase:
            case "init" | "compile":
                return self.limits.init
            case "data":
                # As at the start, where the first workers of a data loader start too. A program
                # with long pauses has a longer limit in its steps.
                return max(self.limits.init, self.limit("train"))
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
        """The limit within a training step, from the previous steps."""
        number = len(self.durations)
        longest = heapq.nlargest(1 + number // OUTLIERS, self.durations)[-1]
        if number < FEW_STEPS:
            return max(FIRST_FLOOR_S, FIRST_STEPS * longest)
        steps = max(HANG_STEPS * statistics.median(self.durations), HANG_SPREAD * longest)
        return steps + HANG_SLACK_S

    def hang(self, now: float) -> HangDetected | None:
        """A hang, if no rank has made progress for longer than the longest limit of their
        phases."""
        ranks = [rank for rank in self.ranks.values() if not rank.ended]
        shortest = min(self.limit(phase) for phase in get_args(Phase))
        # One rank that moves may release the others, so all must stand still. The shortest limit of
        # all phases excludes most calls quickly.
        if not ranks or any(_standstill(rank, now) <= shortest for rank in ranks):
            return None
        # A rank in a phase with a long limit, such as a save, may be the one that the others wait
        # for, so the longest limit applies to all.
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
        """An event if a rank in these digests made progress again after `hang`."""
        for digest in digests:
            rank = self.ranks.get(digest.rank)
            # A rank that has ended, or that has reported nothing yet, releases no other rank.
            if rank is None or rank.ended or rank.step < 0:
                continue
            if _standstill(rank, now) <= hang.limit_s:
                return HangOver(
                    attempt=self.attempt, rank=digest.rank, step=digest.step, phase=digest.phase
                )
        return None

    def tell_soon(self) -> None:
        """Record the next step at once."""
        self.recorded = float("-inf")

    def changes(self, now: float) -> tuple[Notice, ...]:
        """Notices for the user since the last call. No decision depends on them."""
        slow_saves, self.slow_saves = self.slow_saves, []
        return (*slow_saves, *self._health_changes(now))

    def _health_changes(self, now: float) -> tuple[HealthChanged, ...]:
        """Ranks whose health changed since the last call, grouped by the new health."""
        changed: dict[Health, dict[int, float]] = {}
        step_s = self.step_s
        slow = max(SLOW_FLOOR_S, SLOW_STEPS * (step_s or 0.0))
        limits = {phase: self.limit(phase) for phase in get_args(Phase)}
        for number, rank in sorted(self.ranks.items()):
            if rank.ended:
                continue
            age, limit = now - rank.heard, limits[rank.phase]
            # Half of the limit for phases other than training, whose limits are minutes.
            health: Health = "ok"
            if age > max(SILENT_FLOOR_S, limit if rank.phase == "train" else limit / 2):
                health = "silent"
            elif rank.phase == "train" and step_s is not None and age > slow:
                health = "slow"
            # Only changes are events. A job of 16,384 ranks would fill the journal with the same
            # news.
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
    """Ranges of consecutive ranks. `ranks` is sorted."""
    found: list[Span] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return tuple(found)


def _standstill(rank: _RankWatch, now: float) -> float:
    """Seconds for which the rank is known to stand still; if it never reported, since the start."""
    since = now - rank.told
    # A host that reported recently knows how long its rank stands still. If it has been silent
    # for too long, the silence is added. A rank that never reported (step < 0) stood still
    # since the start.
    heard = rank.step >= 0 and since <= UNHEARD_S
    return rank.still if heard else rank.still + since


def _lengths(steps: StepTimes) -> list[float]:
    """Durations of the steps between two digests: the longest are known, the others by the mean."""
    told = (*steps.next_s, steps.longest_s)
    rest = steps.count - len(told)
    others = max(0.0, steps.total_s - sum(told)) / rest if rest > 0 else 0.0
    # More steps than the window keeps would only push the known ones out.
    return [*[others] * max(0, min(rest, STEPS_KEPT - len(told))), *told]

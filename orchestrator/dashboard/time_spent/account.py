"""Divides the time of a job among training and the causes of lost time, from its journal.

The journal tells when the job waited, started, trained and stopped. How much of the training is
lost is known when the next attempt resumes: everything after the step that it resumes from. Of a
program that does not tell that step it is unknown, and none is counted. The time for which saves
paused training is in `metrics.jsonl` (`pauses.py`).

Each second has exactly one use, so the uses add up to the elapsed time.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from msgspec import Struct, field

from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.messages.actions import (
    Action,
    EndJob,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import (
    AgentLost,
    CancelRequested,
    Event,
    HangDetected,
    HangOver,
    JobSubmitted,
    LeaderStarted,
    ProgramRuns,
    RankExited,
    StepReached,
    StragglerFound,
    StragglerGone,
    TrainingResumed,
)
from orchestrator.dashboard.time_spent.pauses import Pause
from orchestrator.journal.journal import Entry

Cause = Literal["detection", "restart", "lost_work", "checkpoint", "queue", "slow"]
"""`detection`: from a failure until ndctl stops the ranks. `restart`: from there, or from the grant
of the hosts, to the first step; of a program without steps until all its ranks run. `lost_work`:
training after the step that the next attempt resumed from. `checkpoint`: saves that paused
training. `queue`: the scheduler had no hosts for the job. `slow`: all ranks waited for a straggler.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)
KINDS: tuple[type[Event] | type[Action], ...] = (
    JobSubmitted,
    LeaderStarted,
    CancelRequested,
    TrainingResumed,
    ProgramRuns,
    StepReached,
    RankExited,
    AgentLost,
    HangDetected,
    HangOver,
    StragglerFound,
    StragglerGone,
    StartAttempt,
    StopAttempt,
    Requeue,
    EndJob,
)
"""The account needs only journal entries with one of these; the others may be left out."""
Use = Cause | Literal["training", "none"]
MOST_SLOW = 0.95
"""Largest share of a step that counts as caused by a straggler."""


class TimeSpent(Struct, frozen=True, kw_only=True):
    elapsed_s: float = 0.0
    """From submission to the end, or until now; without the time between the end of a launch and
    its next submission."""
    lost_s: Mapping[Cause, float] = field(default_factory=dict)
    """Every cause of lost time -> seconds."""

    @property
    def effective_s(self) -> float:
        """Seconds of training that count."""
        return max(0.0, self.elapsed_s - sum(self.lost_s.values()))

    @property
    def ratio(self) -> float | None:
        """Effective time divided by elapsed time; None before any time has passed."""
        return self.effective_s / self.elapsed_s if self.elapsed_s > 0 else None


class Counted(Struct, frozen=True, kw_only=True):
    """A `TimeAccount` at one time. Unlike the account it does not change, so any thread may read
    it."""

    at: float
    elapsed_s: float
    lost_s: Mapping[Cause, float]
    """Without pauses for checkpoints."""
    paused_s: float
    """Pauses for checkpoints."""
    use: Use
    """What the time since `at` is used for."""
    slow_share: float
    """Share of each step that a straggler costs all."""

    def until(self, at: float | None = None) -> TimeSpent:
        """The account up to the Unix time `at`; None: up to the last entry."""
        lost = dict(self.lost_s)
        more_s = max(0.0, (at or 0.0) - self.at) if self.use != "none" else 0.0
        if self.use == "training":
            lost["slow"] += more_s * self.slow_share
        elif self.use != "none":
            lost[self.use] += more_s
        elapsed_s = self.elapsed_s + more_s
        lost["checkpoint"] = min(self.paused_s, elapsed_s - sum(lost.values()))
        return TimeSpent(elapsed_s=elapsed_s, lost_s=lost)


@dataclass(slots=True)
class _Span:
    """Training of one attempt, as far as it counts."""

    first: int
    """Step that was done when the span began."""
    last: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Cut:
    """Attempt `attempt` resumed from `step`."""

    attempt: int
    step: int


class TimeAccount:
    """Takes in the journal's entries in order."""

    def __init__(self) -> None:
        self.lost: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self.elapsed = 0.0
        self.at = 0.0
        self.use: Use = "none"
        """What the time since `at` is used for."""
        self.spans: list[_Span] = []
        self.cuts: list[_Cut] = []
        self.attempt = 0
        self.stopping = False
        self.has_steps = False
        """The job has reported a step, in any attempt."""
        self.trains_since = 0.0
        self.failed_at: float | None = None
        """When the failure happened for which the ranks will probably be stopped."""
        self.hosts: frozenset[str] = frozenset()
        self.slow: dict[int, float] = {}
        """Straggler -> share of each step that it costs all."""

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._event(entry.event)
            for action in entry.actions:
                self._action(action)

    def counted(self, pauses: Iterable[Pause] = ()) -> Counted:
        """The account so far. `pauses`: all saves so far that paused training."""
        attempts = [cut.attempt for cut in self.cuts]
        # From each cut on, the earliest step to which the job went back.
        earliest = list(accumulate((cut.step for cut in reversed(self.cuts)), min))[::-1]
        lost, paused, paused_in_lost = dict(self.lost), 0.0, 0.0
        for pause in pauses:
            later = bisect_right(attempts, pause.attempt)
            is_lost = later < len(earliest) and pause.step > earliest[later]
            paused += pause.seconds
            paused_in_lost += pause.seconds if is_lost else 0.0
        # The pauses of training that is lost count as pauses only.
        lost["lost_work"] = max(0.0, lost["lost_work"] - paused_in_lost)
        return Counted(
            at=self.at,
            elapsed_s=self.elapsed,
            lost_s=lost,
            paused_s=paused,
            use=self.use,
            slow_share=self._slow_share(),
        )

    def spent(self, pauses: Iterable[Pause] = (), until: float | None = None) -> TimeSpent:
        """The account up to the Unix time `until`; None: up to the last entry."""
        return self.counted(pauses).until(until)

    def _event(self, event: Event) -> None:
        match event:
            case JobSubmitted():
                self._advance_to(event.reached, event.at)
                # Between two launches the job does not exist, so that time does not count.
                self.at, self.slow, self.failed_at = event.at, {}, None
                self._turn_to("restart" if event.backend == "local" else "queue", event.at)
            case LeaderStarted():
                self._leader_started(event)
            case CancelRequested(led=False):
                self._advance_to(event.reached, event.at)
                if self.use == "training":
                    self._turn_to("detection", self.at)
            case AgentLost() if event.host in self.hosts:
                self._failed(event.at - event.silent_s)
            # Late news of an earlier attempt changes nothing.
            case _ if getattr(event, "attempt", None) == self.attempt:
                self._of_attempt(event)
            case _:
                pass
        # A failure has the time at which it happened, and its actions follow when it was detected.
        self._accrue(event.at + getattr(event, "detected_after_s", 0.0))

    def _of_attempt(self, event: Event) -> None:
        match event:
            case TrainingResumed(step=step):
                self._cut(step)
            case StepReached(step=step):
                self._step_reached(event.at, step)
            # A program that has reported steps will report the next one: until then, it starts.
            case ProgramRuns() if not self.has_steps:
                # No step will tell that its time is of use, or which of it is lost after a restart.
                self._trains(event.at, 0)
            case RankExited(stopped=False):
                self._rank_exited(event)
            case HangDetected():
                self._stepped(event.step)
                self._failed(event.at - event.stalled_s)
            case HangOver():
                self._accrue(event.at)
                self._detected()
            case StragglerFound():
                self._accrue(event.at)
                share = (event.own_s - event.peers_s) / event.step_s if event.step_s > 0 else 0.0
                self.slow[event.rank] = min(MOST_SLOW, max(0.0, share))
            case StragglerGone():
                self._accrue(event.at)
                self.slow.pop(event.rank, None)
            case _:
                pass

    def _action(self, action: Action) -> None:
        match action:
            case StartAttempt():
                self._turn_to("restart", self.at)
                self.attempt, self.hosts = action.attempt, frozenset(action.hosts)
                self.stopping = False
            case StopAttempt() if action.attempt == self.attempt and self.use == "training":
                self._turn_to("restart", self.at)
                self.stopping = True
            case StopAttempt() if action.attempt == self.attempt:
                self.stopping = True
            case Requeue():
                self._turn_to("queue", self.at)
            case EndJob():
                self._turn_to("none", self.at)
            case _:
                pass

    def _advance_to(self, reached: Reached | None, at: float) -> None:
        """The attempt trained until `reached`, which its leader did not live to record.

        Args:
            at: when that was read.
        """
        if self.use == "training" and reached is not None and reached.attempt == self.attempt:
            self._accrue(min(reached.at, at))
            self._stepped(reached.step)

    def _leader_started(self, event: LeaderStarted) -> None:
        self._advance_to(event.reached, event.at)
        if self.use == "training":
            # A program may report no steps, and then little else tells how long it trained.
            broke = event.allocation.broke_before if event.allocation else None
            lived = max(event.heard or 0.0, broke.at if broke else 0.0)
            self._accrue(min(lived, event.at))
        if event.former or event.allocation is None:  # the hosts stayed
            self._turn_to("detection" if self.use == "training" else "restart", self.at)
        else:  # the scheduler granted hosts
            self._turn_to("queue", self.at)
        self._turn_to("restart", event.at)

    def _stepped(self, step: int) -> None:
        if self.use == "training":
            self.spans[-1].last = max(self.spans[-1].last, step)

    def _step_reached(self, at: float, step: int) -> None:
        # Without a step the program seemed to train, but it started until now. One whose first
        # report is of step 10 trained before.
        if not self.has_steps and step == 1 and self.use == "training":
            self._accrue(at)
            self.lost["restart"] += self.spans[-1].seconds
            self.spans[-1].seconds, self.trains_since = 0.0, at
        self.has_steps = True
        self._trains(at, step)

    def _rank_exited(self, event: RankExited) -> None:
        self._stepped(event.step)
        # A program may let a rank end while the others go on: that is no failure.
        if event.exit_code != 0:
            self._failed(event.at)

    def _trains(self, at: float, step: int) -> None:
        if self.stopping or self.use in ("none", "queue"):
            return
        if self.use != "training":
            self._turn_to("training", at)
            self.trains_since = at
            self.spans.append(_Span(step, step))
        self.spans[-1].last = max(self.spans[-1].last, step)

    def _failed(self, at: float) -> None:
        if self.use == "training" and self.failed_at is None:
            self.failed_at = max(at, self.trains_since)

    def _turn_to(self, use: Use, at: float) -> None:
        self._accrue(at)
        self._detected()
        self.use, self.slow = use, {}

    def _accrue(self, to: float) -> None:
        passed_s = to - self.at
        if passed_s <= 0:
            return
        self.at = to
        if self.use == "none":
            return
        self.elapsed += passed_s
        if self.use != "training":
            self.lost[self.use] += passed_s
            return
        slow_s = passed_s * self._slow_share()
        self.lost["slow"] += slow_s
        self.spans[-1].seconds += passed_s - slow_s

    def _slow_share(self) -> float:
        return max(self.slow.values(), default=0.0)

    def _detected(self) -> None:
        """The time since the failure was no training."""
        if self.failed_at is None or self.use != "training":
            self.failed_at = None
            return
        span = self.spans[-1]
        moved_s = min(span.seconds, max(0.0, self.at - self.failed_at))
        span.seconds -= moved_s
        self.lost["detection"] += moved_s
        self.failed_at = None

    def _cut(self, step: int) -> None:
        """All training after `step` is lost."""
        self.cuts.append(_Cut(self.attempt, step))
        while self.spans and self.spans[-1].last > step:
            span = self.spans[-1]
            steps = span.last - span.first
            share = 1.0 if span.first >= step else (span.last - step) / steps
            self.lost["lost_work"] += span.seconds * share
            if span.first < step:
                span.seconds, span.last = span.seconds * (1 - share), step
                return
            self.spans.pop()
        # The word that the attempt has resumed may come after its first step, if a leader was lost
        # between the two. The training goes on, so its time needs a span.
        if self.use == "training" and not self.spans:
            self.spans.append(_Span(step, step))

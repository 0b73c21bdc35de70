"""How one rank gets on, as the agent beside it sees it: since when it stands still, how long its
steps take. Pure: the times are passed in."""

import math
from collections.abc import Sequence

from orchestrator.contract.messages.agent_protocol import StepTimes
from orchestrator.contract.messages.rank_messages import Beat
from orchestrator.contract.messages.rank_phase import Phase

LONGEST = 5
"""Steps of which a digest tells each: of as many as the leader keeps, four do not count."""
STEPPING: tuple[Phase, ...] = ("train", "write")
"""A step begins when a rank says the first, and is done when it says either at the next step."""


def still_in(paces: Sequence["Pace"], limit_s: float, now: float) -> float:
    """Seconds until all of them have stood still for `limit_s`; infinite where that was told."""
    if not paces:
        return math.inf
    latest = max(paces, key=lambda pace: pace.since)
    return math.inf if latest.told >= limit_s else latest.since + limit_s - now


class Pace:
    def __init__(self, now: float, waited_for_cpu: float) -> None:
        self.since = now
        """When step or phase last changed, later by what is excused."""
        self.changed = now
        """When it truly did."""
        self.told = 0.0
        """How long the last digest said that it stands still."""
        self.starved = 0.0
        """Seconds since then in which it was ready to run and had no processor."""
        self._waited = waited_for_cpu
        self._begun: float | None = None
        """When its present step began; None outside a step, and in an attempt's first."""
        self._trained = False
        self._count = 0
        self._total = 0.0
        self._longest: list[float] = []
        """The longest ones, from the longest down."""
        self._own: float | None = None

    def beat(self, step: int, phase: Phase, beat: Beat, now: float) -> None:
        """`beat` came; until now the rank was in `phase`, with `step` steps done."""
        if (beat.step, beat.phase) == (step, phase):
            return
        self.since, self.changed, self.told, self.starved = now, now, 0.0, 0.0
        stepped = beat.step > step and phase != "init"
        if stepped and self._begun is not None and beat.phase in STEPPING:
            self._stepped(now - self._begun, beat.step - step, beat.own_s)
        # The first step of an attempt is slower than all others.
        self._trained = self._trained or stepped
        self._begun = now if beat.phase == "train" and self._trained else None

    def _stepped(self, seconds: float, steps: int, own_s: float | None) -> None:
        """`steps` is more than one where beats were lost."""
        self._count += steps
        self._total += seconds
        each = [seconds / steps] * min(steps, LONGEST)
        self._longest = sorted([*self._longest, *each], reverse=True)[:LONGEST]
        if own_s is not None:
            self._own = (self._own or 0.0) + own_s * steps

    def excuse(self, seconds: float) -> None:
        self.since += seconds

    def still(self, now: float, waited_for_cpu: float) -> float:
        """Seconds since step or phase changed. A rank that is ready to run and has no processor
        does not stand still."""
        waited = max(0.0, waited_for_cpu - self._waited)
        self._waited = waited_for_cpu
        self.starved = min(self.starved + waited, now - self.changed)
        self.since = min(now, self.since + waited)
        self.told = now - self.since
        return self.told

    def take(self) -> StepTimes | None:
        if not self._count:
            return None
        times = StepTimes(
            count=self._count,
            total_s=self._total,
            longest_s=self._longest[0],
            next_s=tuple(self._longest[1:]),
            own_s=self._own,
        )
        self._count, self._total, self._longest, self._own = 0, 0.0, [], None
        return times

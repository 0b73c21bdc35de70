"""The progress of one rank as its agent sees it: since when it is stuck, and how long steps take.

Pure: the times are passed in.
"""

import math
from collections.abc import Sequence

from ndctl.rank.phases import Phase
from orchestrator.contract.messages.agent_protocol import StepTimes
from orchestrator.contract.messages.rank_messages import Beat

LONGEST = 5
"""Number of longest steps that a digest lists one by one. The leader ignores the four longest
steps of those that it keeps."""
STEPPING: tuple[Phase, ...] = ("train", "write")
"""A step begins when a rank reports the first of these phases, and ends when it reports either of
them at the next step."""


def still_in(paces: Sequence["Pace"], limit_s: float, now: float) -> float:
    """Seconds until all ranks have made no progress for `limit_s`; infinite if a digest has already
    reported that."""
    if not paces:
        return math.inf
    latest = max(paces, key=lambda pace: pace.since)
    return math.inf if latest.told >= limit_s else latest.since + limit_s - now


class Pace:
    def __init__(self, now: float, waited_for_cpu: float) -> None:
        self.since = now
        """When step or phase last changed, moved later by excused time."""
        self.changed = now
        """When step or phase really changed."""
        self.told = 0.0
        """Seconds without progress that the last digest reported."""
        self.starved = 0.0
        """Seconds since `changed` in which the rank was ready to run but had no processor."""
        self._waited = waited_for_cpu
        self._begun: float | None = None
        """When the present step began; None outside a step, and in the first step of an attempt."""
        self._trained = False
        self._count = 0
        self._total = 0.0
        self._longest: list[float] = []
        """The longest steps in seconds, the longest first."""
        self._own: float | None = None

    def beat(self, step: int, phase: Phase, beat: Beat, now: float) -> None:
        """Take in `beat`. Until now the rank was in `phase` and had done `step` steps."""
        if (beat.step, beat.phase) == (step, phase):
            if beat.active:
                self.active(now)
            return
        self.since, self.changed, self.told, self.starved = now, now, 0.0, 0.0
        stepped = beat.step > step and phase != "init"
        if stepped and self._begun is not None and beat.phase in STEPPING:
            self._stepped(now - self._begun, beat.step - step, beat.own_s)
        # The first step of an attempt compiles and allocates. It is slower than all others and
        # would spoil the statistics.
        self._trained = self._trained or stepped
        self._begun = now if beat.phase == "train" and self._trained else None

    def active(self, now: float) -> None:
        """The rank does something, although neither its step nor its phase has changed."""
        self.since, self.changed, self.told, self.starved = now, now, 0.0, 0.0

    def _stepped(self, seconds: float, steps: int, own_s: float | None) -> None:
        """
        Args:
            steps: more than one if beats were lost.
        """
        self._count += steps
        self._total += seconds
        # Only the total of these steps is known, so each counts with the mean.
        each = [seconds / steps] * min(steps, LONGEST)
        self._longest = sorted([*self._longest, *each], reverse=True)[:LONGEST]
        if own_s is not None:
            self._own = (self._own or 0.0) + own_s * steps

    def excuse(self, seconds: float) -> None:
        self.since += seconds

    def still(self, now: float, waited_for_cpu: float) -> float:
        """Seconds since step or phase changed. Time in which the rank was ready to run but had no
        processor does not count."""
        waited = max(0.0, waited_for_cpu - self._waited)
        self._waited = waited_for_cpu
        self.starved = min(self.starved + waited, now - self.changed)
        # Excused time and the wait for a processor may overlap. A standstill is never negative.
        self.since = min(now, self.since + waited)
        self.told = now - self.since
        return self.told

    def take(self) -> StepTimes | None:
        """The steps since the last call; None if there were none."""
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

"""Simulates one possible history of a job, drawn from a seed.

Failures are a Poisson process. A failure during recovery starts the recovery again. Missing hosts
are replaced one at a time, by a host of the reserve or by the repaired one, whichever is first;
these times have exponential distributions. The simulation jumps from failure to failure, because
the time between them follows from formulas.
"""

import math
from bisect import bisect, insort
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from orchestrator.forecast.setting import PARTS, Hazard, Setting


@dataclass(slots=True)
class Account:
    """How the time of one history was spent."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    failures: int = 0
    """Number of unplanned failures."""
    waits: int = 0
    """Number of failures at which no spare was available."""


def history(setting: Setting, seed: int) -> Account:
    """The same seed gives the same history."""
    return _History(setting, Random(seed)).run()


class _History:
    def __init__(self, setting: Setting, random: Random) -> None:
        self.setting = setting
        self.random = random
        self.account = Account()
        self.now = 0.0
        self.up_to = list(accumulate(hazard.per_s for hazard in setting.hazards))
        self.per_s = self.up_to[-1]
        self.stall_s = setting.stalled_s
        self.phase_s = 0.0
        """Training and stalls since the last save to the disk that a failure did not cut off."""
        self.unsaved_s = 0.0
        """Training that is kept in memory only, since the last complete save to the disk."""
        self.reads_disk = True
        """The next attempt reads the disk."""
        self.failure_at = random.expovariate(self.per_s)
        self.hosts = _Hosts(setting, random)
        self.whole_at = 0.0
        """Time at which there are as many hosts as the job needs."""

    def run(self) -> Account:
        setting, horizon = self.setting, self.setting.horizon_s
        while self.now < horizon:
            ends = min(self.failure_at, horizon)
            broken = self.failure_at < horizon
            hazard = self._hazard() if broken else None
            self._train(ends - self.now, hazard)
            self.now = ends
            self.reads_disk = setting.memory is None
            while hazard is not None:
                hazard = self._recover(hazard)
        return self.account

    def _hazard(self) -> Hazard:
        drawn = bisect(self.up_to, self.random.random() * self.per_s)
        return self.setting.hazards[min(drawn, len(self.up_to) - 1)]

    def _train(self, span_s: float, hazard: Hazard | None) -> None:
        """Train and save for `span_s`, and lose what `hazard` takes."""
        setting, seconds = self.setting, self.account.seconds
        stall_s, cycle_s = self.stall_s, setting.interval_s + self.stall_s
        copying_s = 0.0 if setting.memory is None else setting.memory.share * span_s
        before_s = max(0.0, self.phase_s - setting.interval_s)
        since_s = self.phase_s + span_s - copying_s
        cycles, rest_s = divmod(since_s, cycle_s)
        stalled_s = cycles * stall_s + max(0.0, rest_s - setting.interval_s) - before_s
        trained_s = span_s - copying_s - stalled_s
        complete = math.floor((since_s - setting.interval_s - setting.write_s) / cycle_s) + 1
        self.unsaved_s += trained_s
        if complete > 0:
            self.unsaved_s = (cycles - complete) * setting.interval_s
            self.unsaved_s += min(rest_s, setting.interval_s)
        self.phase_s = rest_s
        seconds["training"] += trained_s
        seconds["checkpoint stalls"] += copying_s + stalled_s
        if hazard is not None and hazard.covered:
            self._lose(trained_s - self._copied_s(span_s))

    def _copied_s(self, span_s: float) -> float:
        """Training of the last `span_s` that is in the newest complete copy in memory."""
        memory = self.setting.memory
        assert memory is not None
        cycle_s = memory.interval_s + memory.stall_s
        complete = math.floor((span_s - memory.interval_s - memory.lag_s) / cycle_s) + 1
        return max(0, complete) * memory.interval_s

    def _lose(self, lost_s: float) -> None:
        lost_s = min(max(0.0, lost_s), self.unsaved_s)
        self.unsaved_s -= lost_s
        self.phase_s = max(0.0, self.phase_s - lost_s)
        self.account.seconds["training"] -= lost_s
        self.account.seconds["lost work"] += lost_s

    def _restart_from(self, hazard: Hazard) -> None:
        """What is lost, and where the next attempt reads."""
        if hazard.planned:
            self.unsaved_s = self.phase_s = 0.0
        elif not hazard.covered:
            self._lose(self.unsaved_s)
            self.unsaved_s = self.phase_s = 0.0
            self.reads_disk = True

    def _recover(self, hazard: Hazard) -> Hazard | None:
        """Time from a failure to the next step. Returns a failure during that time, or None."""
        self.failure_at = self.now + self.random.expovariate(self.per_s)
        self.account.failures += not hazard.planned
        self._restart_from(hazard)
        if hazard.takes_host:
            ready_at = self.hosts.replace(self.now)
            self.account.waits += ready_at > self.now
            self.whole_at = max(self.whole_at, ready_at)
        if hazard.planned:
            first = ("checkpoint stalls", self.setting.write_s)
        else:
            first = ("detection", hazard.detection_s)
        for part, length_s in (first, ("queue", None), ("restart", self._restart_s)):
            until = self.now + length_s if length_s is not None else max(self.now, self.whole_at)
            ends = min(until, self.failure_at, self.setting.horizon_s)
            self.account.seconds[part] += ends - self.now
            self.now = ends
            if ends < until:
                return self._hazard() if ends < self.setting.horizon_s else None
        return None

    @property
    def _restart_s(self) -> float:
        memory = self.setting.memory
        return self.setting.restart_s if self.reads_disk or not memory else memory.restart_s


class _Hosts:
    """Replacements for hosts that leave, and when they come."""

    def __init__(self, setting: Setting, random: Random) -> None:
        self.setting = setting
        self.random = random
        self.filled_at: list[float] = []
        """Times at which the missing hosts are replaced, ascending."""
        self.ready_at = [0.0] * setting.reserve
        """Times from which on each host of the reserve can be granted, ascending. When the reserve
        gives a host, it gets the failed host in return, once that is repaired."""

    def replace(self, now: float) -> float:
        """Time at which the job has enough hosts again, after one left at `now`."""
        del self.filled_at[: bisect(self.filled_at, now)]
        filled_at = now + self.random.expovariate(1 / self.setting.repair_s)
        queue_s = self.random.expovariate(1 / self.setting.queue_s)
        if self.ready_at and max(now, self.ready_at[0]) + queue_s < filled_at:
            granted_at = max(now, self.ready_at.pop(0)) + queue_s
            insort(self.ready_at, filled_at)
            filled_at = granted_at
        insort(self.filled_at, filled_at)
        short = len(self.filled_at) - self.setting.spares
        return self.filled_at[short - 1] if short > 0 else now

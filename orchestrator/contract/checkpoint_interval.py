"""How often a job fails and how often it should save; the trainer and the forecast share it.

Every host in use fails at some rate, and a job fails at the sum of the rates of its hosts. The best
interval between saves follows from that rate and from the cost of a save (Young 1974, Daly 2006).

With checkpoints in memory, too, a save to the disk helps only after failures that memory does not
cover. To first order the two tiers do not affect each other: per second of training they cost
c/w + r w/2 each, where c is the cost of a copy, w the interval, and r the rate of the failures that
the tier recovers from (Vaidya 1995, A case for two-level distributed recovery schemes). So each has
the interval that it would have alone, with its own rate.
"""

import math

from msgspec import Struct

HOST_MTBF_S = 1000 / 6.5 * 86400
"""Prior for one host: 6.5 failures per 1,000 host-days (Kokolis et al. 2025, arXiv 2410.21680,
cluster RSC-1). It is used until the job has failed, and then averaged with the job's own rate."""
PRIOR_FAILURES = 1.0
"""Weight of the prior: as much as one observed failure in the time in which one is expected."""
MOST_STALLED = 0.1
"""Largest share of the time in which training may stand still for saves."""
MEMORY_ON_CPU, MEMORY_ON_GPU = 0.02, 0.007
"""Part of the training time that copies in memory may take with `checkpoint.memory.every: auto`. On
a CPU they compete with the step for the bandwidth of the memory."""
LONGEST_S = 3600.0
"""Largest amount of work that one failure may cost, because failure rates are guesses. If both
limits conflict, `MOST_STALLED` wins."""


class Exposure(Struct, frozen=True, kw_only=True):
    """How long a job was observed, and how often it failed in that time."""

    failures: int = 0
    in_memory: int = 0
    """Failures of those after which ranks resumed from the memory of the hosts."""
    observed_s: float = 0.0

    def mtbf_s(self, hosts: int, further_s: float = 0.0) -> float:
        """Mean time between failures of a job on `hosts` hosts, after `further_s` more seconds
        without a failure: the inverse of the mean of the rate's gamma posterior."""
        expected_s = PRIOR_FAILURES * HOST_MTBF_S / hosts
        seen_s = self.observed_s + further_s
        return (expected_s + seen_s) / (PRIOR_FAILURES + self.failures)

    @property
    def on_disk(self) -> float:
        """The part of the next failures after which a job with checkpoints in memory reads the
        disk, by Laplace's rule of succession: a half before the first failure."""
        return (self.failures - self.in_memory + 1) / (self.failures + 2)


class SavePace(Struct, frozen=True, kw_only=True):
    """What an attempt needs to know for `checkpoint.every: auto`."""

    exposure: Exposure = Exposure()
    every_steps: int | None = None
    """The interval that an earlier attempt used last."""


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Training time between two saves that wastes the least time if each save costs `cost_s` (Daly
    2006, A higher order estimate of the optimum checkpoint interval, equation 37)."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    young_s = math.sqrt(2 * cost_s * mtbf_s)
    return young_s * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def memory_steps(cost_s: float, step_s: float, share: float) -> int:
    """Steps between two copies in memory that each take `cost_s`, so that they take `share` of the
    time."""
    return max(1, math.ceil(cost_s / (share * step_s)))


class Interval(Struct, frozen=True, kw_only=True):
    """Training time between two saves."""

    seconds: float
    bound: str = ""
    """Why it is not the optimum; empty if it is."""


def interval_of(cost_s: float, write_s: float, mtbf_s: float) -> Interval:
    """The optimum within its limits. A save must be complete before the next one begins."""
    best = daly_s(cost_s, mtbf_s)
    least = cost_s * (1 / MOST_STALLED - 1)
    if best < max(write_s, least):
        if write_s >= least:
            return Interval(seconds=write_s, bound="a save takes as long")
        return Interval(seconds=least, bound=f"saves may take {MOST_STALLED:.0%} of the time")
    most = max(LONGEST_S, write_s, least)
    if best > most:
        return Interval(seconds=most, bound=f"a failure may cost {most:.0f} s of work")
    return Interval(seconds=best)

"""How often a job breaks, and how often it should save: what trainer and forecast share.

A host that is used breaks at a rate of its own, and a job at the sum of its hosts' rates. From that
and from what a save costs follows the interval between saves (Young 1974, Daly 2006).
"""

import math
from dataclasses import dataclass

HOST_MTBF_S = 1000 / 6.5 * 86400
"""Until a job has broken, and beside how often it did: 6.5 failures per 1,000 host-days (Kokolis et
al. 2025, arXiv 2410.21680, cluster RSC-1)."""
PRIOR_FAILURES = 1.0
"""How much that weighs: as one failure seen in the time in which one is expected."""
MOST_STALLED = 0.1
"""The largest share of its time for which a job is to stand still for saves …"""
LONGEST_S = 3600.0
"""… and the most work that one failure may cost, for rates are guesses; the first one wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """How long a job was watched, and how often it broke meanwhile."""

    failures: int = 0
    observed_s: float = 0.0

    def mtbf_s(self, hosts: int, further_s: float = 0.0) -> float:
        """Mean time between failures of a job on so many hosts, after `further_s` without one: the
        mean of the rate's gamma posterior, inverted."""
        expected_s = PRIOR_FAILURES * HOST_MTBF_S / hosts
        seen_s = self.observed_s + further_s
        return (expected_s + seen_s) / (PRIOR_FAILURES + self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePace:
    """What an attempt is to know for `checkpoint.every: auto`."""

    exposure: Exposure = Exposure()
    every_steps: int | None = None
    """What an earlier attempt had come to."""


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Training between two saves that wastes least, each of which costs `cost_s` (Daly 2006, A
    higher order estimate of the optimum checkpoint interval, equation 37)."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    young_s = math.sqrt(2 * cost_s * mtbf_s)
    return young_s * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Training between two saves."""

    seconds: float
    bound: str = ""
    """What kept it from the optimum; empty where nothing did."""


def interval_of(cost_s: float, write_s: float, mtbf_s: float) -> Interval:
    """The optimum within its bounds; a save is to be complete before the next one begins."""
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

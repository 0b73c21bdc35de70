"""The same expectation in closed form, as a check of the histories and to search by.

Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps, equation
20), with what a save in the background adds: until it is complete, a failure costs that time too.
All of it holds for the time in which the job has its hosts (`short`). It is of the long run, where
histories begin with all hosts.
"""

import math
from dataclasses import replace

from orchestrator.contract.checkpoint_interval import daly_s
from orchestrator.forecast.setting import Setting


def effective(setting: Setting) -> float:
    """The share of its time in which a job does work that is kept."""
    mtbf_s, stall_s = setting.mtbf_s, setting.stalled_s
    exposed_s = max(0.0, setting.write_s - stall_s)
    recovery_s = detection_s(setting) + setting.restart_s + exposed_s
    cycle_s = setting.interval_s + stall_s
    exponent = (recovery_s + cycle_s) / mtbf_s
    if exponent > 500:  # no end of it is in sight
        return 0.0
    cycle = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1(cycle_s / mtbf_s)
    planned = sum(hazard.per_s for hazard in setting.hazards if hazard.planned)
    away = planned * (setting.write_s + setting.restart_s)
    return (1 - short(setting)) * setting.interval_s / cycle * max(0.0, 1 - away)


def detection_s(setting: Setting) -> float:
    """Mean, of failures that nobody planned."""
    return setting.mtbf_s * sum(hazard.per_s * hazard.detection_s for hazard in setting.unplanned)


def short(setting: Setting) -> float:
    """The share of the time in which fewer hosts are there than the job needs.

    How many are being repaired is a Poisson number, whoever steps in for them. The reserve steps
    in for as many as it has hosts, and of those places a share is still open, in the queue, each
    for itself; of what goes beyond the reserve each place is. Exact where the reserve is ample or
    there is none; between them (the queue follows what is being repaired as if at once) near.
    """
    mean = setting.leaving_per_s * setting.repair_s
    queued = setting.queue_s / (setting.queue_s + setting.repair_s)
    share = 0.0
    more = 0.0  # the probability of more open places than there are spares
    for gone in range(math.ceil(mean + 10 * math.sqrt(mean)) + 20):
        share += _poisson(gone, mean) * more
        if gone < setting.reserve:
            more += queued * _binomial(gone, setting.spares, queued)
        else:
            beyond = gone - setting.reserve
            more += _binomial(setting.reserve, setting.spares - beyond, queued)
    return min(1.0, share)


def bare(setting: Setting) -> float:
    """The share of the time in which no number of spares would do: more hosts are being repaired
    than there are beside those that the job needs."""
    return short(replace(setting, spares=setting.spares + setting.reserve, reserve=0))


def _poisson(count: int, mean: float) -> float:
    """Its logarithm does not underflow."""
    if mean == 0:
        return float(count == 0)
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


def _binomial(total: int, count: int, share: float) -> float:
    if not 0 <= count <= total:
        return 0.0
    ways = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    return math.exp(ways + count * math.log(share) + (total - count) * math.log1p(-share))


def best_interval_s(setting: Setting) -> float:
    """What maximises `effective`: near Daly's optimum, which knows nothing of saves in the
    background; by golden section in the logarithm."""
    guess = daly_s(max(setting.stall_s, 1e-3), setting.mtbf_s)
    low, high = math.log(guess / 20), math.log(20 * guess)
    ratio = (math.sqrt(5) - 1) / 2

    def worth(exponent: float) -> float:
        return effective(replace(setting, interval_s=math.exp(exponent)))

    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if worth(left) < worth(right):
            low = left
        else:
            high = right
    return math.exp((low + high) / 2)


def best_spares(setting: Setting) -> int:
    """How many hosts, of those that there are, are best held as spares: each could train as well,
    so what counts is kept work over all hosts that the job holds."""
    there = setting.spares + setting.reserve
    most = 1 - bare(setting)
    best, best_worth = 0, -1.0
    for spares in range(there + 1):
        if most * setting.hosts / (setting.hosts + spares) <= best_worth:
            break  # more could not be better even if nobody waited in the queue
        held = replace(setting, spares=spares, reserve=there - spares)
        worth = (1 - short(held)) * setting.hosts / (setting.hosts + spares)
        if worth > best_worth:
            best, best_worth = spares, worth
    return best

"""The expected share of training in closed form: checks the simulations and proposes an interval.

Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps, equation
20), extended by saves in the background: a failure before a save is complete costs that time too.
With checkpoints in memory it counts those failures after which the disk is read. The others cost
what was trained since the last copy: half an interval on average. It holds for the time in which
the job has its hosts (`short`) and describes the long run, while simulations begin with all hosts
available.
"""

import math

from msgspec.structs import replace

from orchestrator.contract.checkpoint_interval import daly_s
from orchestrator.forecast.setting import MemoryTier, Setting


def effective(setting: Setting) -> float:
    """The share of time in which the job trains and keeps the result."""
    if setting.memory is not None:
        return _with_memory(setting, setting.memory)
    mtbf_s, stall_s = setting.mtbf_s, setting.stalled_s
    exposed_s = max(0.0, setting.write_s - stall_s)
    recovery_s = detection_s(setting) + setting.restart_s + exposed_s
    cycle_s = setting.interval_s + stall_s
    exponent = (recovery_s + cycle_s) / mtbf_s
    if exponent > 500:  # Failures are so frequent that no interval is completed.
        return 0.0
    cycle = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1(cycle_s / mtbf_s)
    planned = sum(hazard.per_s for hazard in setting.hazards if hazard.planned)
    away = planned * (setting.write_s + setting.restart_s)
    return (1 - short(setting)) * setting.interval_s / cycle * max(0.0, 1 - away)


def _with_memory(setting: Setting, memory: MemoryTier) -> float:
    """To first order the two tiers do not affect each other (`contract/checkpoint_interval.py`)."""
    covered = [hazard for hazard in setting.hazards if hazard.covered]
    each_s = memory.restart_s + memory.interval_s / 2 + memory.lag_s
    recovering = sum(hazard.per_s * (hazard.detection_s + each_s) for hazard in covered)
    disk = _without_covered(setting)
    # Hosts leave for repair after both kinds of failures.
    if short(disk) > 1 - 1e-9:  # nearly all hosts are under repair, so a ratio is only rounding
        return 0.0
    hosts = (1 - short(setting)) / (1 - short(disk))
    return effective(disk) * hosts * (1 - memory.share) / (1 + recovering)


def _without_covered(setting: Setting) -> Setting:
    """The same job with those failures only after which the disk is read."""
    hazards = tuple(hazard for hazard in setting.hazards if not hazard.covered)
    return replace(setting, hazards=hazards, memory=None)


def detection_s(setting: Setting) -> float:
    """Mean time to detect an unplanned failure."""
    return setting.mtbf_s * sum(hazard.per_s * hazard.detection_s for hazard in setting.unplanned)


def short(setting: Setting) -> float:
    """The share of time in which the job has too few hosts.

    The number of hosts in repair is Poisson. The reserve replaces as many as it has; each of these
    replacements may still be in the queue, independently. Hosts beyond the reserve have no
    replacement. Exact with an ample reserve or none; approximate between, because the queue is
    taken to follow the repairs without delay.
    """
    mean = setting.leaving_per_s * setting.repair_s
    queued = setting.queue_s / (setting.queue_s + setting.repair_s)
    share = 0.0
    more = 0.0  # the probability that more places are open than spares exist
    for gone in range(math.ceil(mean + 10 * math.sqrt(mean)) + 20):
        share += _poisson(gone, mean) * more
        if gone < setting.reserve:
            more += queued * _binomial(gone, setting.spares, queued)
        else:
            beyond = gone - setting.reserve
            more += _binomial(setting.reserve, setting.spares - beyond, queued)
    return min(1.0, share)


def bare(setting: Setting) -> float:
    """The share of time in which more hosts are in repair than spares and reserve together have."""
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
    """The interval that maximises `effective`, by golden section in the logarithm. It is close to
    Daly's optimum, which does not consider saves in the background."""
    guess = daly_s(max(setting.stall_s, 1e-3), _without_covered(setting).mtbf_s)
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
    """The best number of spares among the job's hosts. A spare could train instead, so the measure
    is kept work divided by all hosts that the job holds."""
    there = setting.spares + setting.reserve
    most = 1 - bare(setting)
    best, best_worth = 0, -1.0
    for spares in range(there + 1):
        if most * setting.hosts / (setting.hosts + spares) <= best_worth:
            break  # more spares cannot help even if no replacement ever waited in the queue
        held = replace(setting, spares=spares, reserve=there - spares)
        worth = (1 - short(held)) * setting.hosts / (setting.hosts + spares)
        if worth > best_worth:
            best, best_worth = spares, worth
    return best

"""The same expectation in closed form, as a check of the histories and to search by.

Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps, equation
20), with what a save in the background adds: until it is complete, a failure costs that time too.
Missing hosts are a Poisson number, which holds as long as the job seldom waits for one.
"""

import math
from dataclasses import replace

from orchestrator.contract.reliability import daly_s
from orchestrator.forecast.setting import Setting


def effective(setting: Setting) -> float:
    """The share of its time in which a job does work that is kept."""
    mtbf_s, stall_s = setting.mtbf_s, setting.stalled_s
    exposed_s = max(0.0, setting.write_s - stall_s)
    recovery_s = detection_s(setting) + waiting_s(setting) + setting.restart_s + exposed_s
    cycle_s = setting.interval_s + stall_s
    exponent = (recovery_s + cycle_s) / mtbf_s
    if exponent > 500:  # no end of it is in sight
        return 0.0
    cycle = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1(cycle_s / mtbf_s)
    planned = sum(hazard.per_s for hazard in setting.hazards if hazard.planned)
    away = planned * (setting.write_s + setting.restart_s)
    return setting.interval_s / cycle * max(0.0, 1 - away)


def detection_s(setting: Setting) -> float:
    """Mean, of failures that nobody planned."""
    return setting.mtbf_s * sum(hazard.per_s * hazard.detection_s for hazard in setting.unplanned)


def waiting_s(setting: Setting) -> float:
    """Mean wait for a host, over all failures that nobody planned."""
    filled_per_s = 1 / missing_s(setting)
    short = _at_least(setting.spares, setting.leaving_per_s / filled_per_s)
    each_s = 1 / ((setting.spares + 1) * filled_per_s)
    return short * each_s * setting.leaving_per_s * setting.mtbf_s


def missing_s(setting: Setting) -> float:
    """Mean time until a host that left is replaced, whoever comes first."""
    granted_per_s = 1 / setting.queue_s if setting.reserve else 0.0
    return 1 / (1 / setting.repair_s + granted_per_s)


def _at_least(least: int, mean: float) -> float:
    """P(N >= least) of a Poisson number; its logarithms do not underflow."""
    if mean == 0:
        return float(least == 0)
    below = sum(
        math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in range(least)
    )
    return max(0.0, 1 - below)


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
    mean = setting.leaving_per_s * missing_s(setting)
    most = min(there, math.ceil(mean + 6 * math.sqrt(mean) + 6))

    def worth(spares: int) -> float:
        held = replace(setting, spares=spares, reserve=there - spares)
        return effective(held) * setting.hosts / (setting.hosts + spares)

    return max(range(most + 1), key=worth)

"""Corrects the speed of a plan by what earlier jobs of the same model family and device measured.

The planner's error is taken as normally distributed in the logarithm of the speed. Before any job,
its spread is the plan's published range. Each job is an observation of the error that it shares
with the plan, plus an error of its own. So the correction is the usual mean of a normal
distribution with a normal prior (Gelman et al. 2013, section 2.5): few jobs move it a little, and
many jobs move it to their median and narrow the range down to the spread of single jobs.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from orchestrator.contract.plan import Choice, Plan, SpeedCorrection, StepTime
from orchestrator.inventory.profile import Fabric
from orchestrator.plan.accuracy import GUESSED, axes_of, length_of
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.history.record import SpeedRecord
from orchestrator.plan.setup import Setup

MOST_JOBS = 64
"""The newest jobs that count."""
UNLIKE = 0.5
"""Weight of a job for each property that differs from the plan's."""
NEAR = 4.0
"""Sizes of models, and numbers of ranks, within this factor count as alike."""
EDGE = 1.6449
"""Standard deviations from the median to the edge of a range, which has 9 of 10 values of a normal
distribution."""
OWN_SHARE, LEAST_OWN, MOST_OWN = 0.35, 0.04, 0.9
"""Standard deviation of the error that a job does not share with others of its kind, as a share of
the whole error; at least, in logarithms; and at most, as a share. An assumption, which `OWN_JOBS`
observed jobs outweigh."""
OWN_JOBS = 3.0
FAR, NORMAL = 3.0, 1.4826
"""Standard deviations beyond which a job counts as being just so far off; and a standard deviation
in median absolute deviations, of a normal distribution."""
BOUNDS = {True: (0.5, 2.0), False: (0.05, 20.0)}
"""Smallest and largest correction; whether the constants of the device are more than guesses."""


class Observed(NamedTuple):
    """A job beside what this planner predicts for it."""

    log_ratio: float
    """Logarithm of measured speed / predicted speed."""
    weight: float
    """1: like the plan in all properties."""


class Posterior(NamedTuple):
    """Measured speed relative to the planned one, after the observations."""

    factor: float
    low: float
    high: float


def corrected(plan: Plan, setup: Setup, fabric: Fabric, earlier: Sequence[SpeedRecord]) -> Plan:
    """`plan`, with all times as `earlier` jobs suggest; unchanged if none of them is comparable.

    Args:
        earlier: the newest last.
    """
    if plan.time is None:
        return plan
    seen = observed(setup, fabric, earlier)
    if not seen:
        return plan
    found = posterior(plan.time, seen)
    correction = SpeedCorrection(
        factor=found.factor,
        jobs=len(seen),
        family=setup.shape.model_type,
        profile=fabric.profile.name,
    )
    return _scaled(plan, _time(plan.time, found, correction), found.factor)


def observed(setup: Setup, fabric: Fabric, earlier: Iterable[SpeedRecord]) -> tuple[Observed, ...]:
    """The newest comparable jobs."""
    latest = {record.identity: record for record in earlier}  # a repeated record counts once
    found: list[Observed] = []
    for record in reversed(latest.values()):
        weight = likeness(setup, record.setup) if record.profile == fabric.profile.name else 0.0
        if not weight:
            continue
        ratio = _ratio(record, fabric)
        if ratio is not None:
            found.append(Observed(math.log(ratio), weight))
        if len(found) == MOST_JOBS:
            break
    return tuple(found)


def likeness(one: Setup, other: Setup) -> float:
    """Weight of a job for a plan; 0: another family, or another kind of arithmetic."""
    same = one.shape.model_type == other.shape.model_type and (
        one.dtype,
        one.float8,
        one.lora is None,
    ) == (other.dtype, other.float8, other.lora is None)
    if not same:
        return 0.0
    differs = (
        one.compile != other.compile,
        one.checkpointing != other.checkpointing,
        (axes_of(one.mesh), one.data) != (axes_of(other.mesh), other.data),
        length_of(one.tokens) != length_of(other.tokens),
        not _near(one.shape.parameters, other.shape.parameters),
        not _near(one.mesh.world_size, other.mesh.world_size),
    )
    return UNLIKE ** sum(differs)


def _near(one: float, other: float) -> bool:
    return max(one, other) <= NEAR * min(one, other)


def _ratio(record: SpeedRecord, fabric: Fabric) -> float | None:
    """Measured speed / predicted speed; None if the record cannot be predicted, or cannot be
    true."""
    hosts = Fabric(
        profile=fabric.profile, hosts=record.hosts, devices_per_host=record.devices_per_host
    )
    try:
        ratio = step_time(record.setup, hosts).step_s / record.step_s
    except (ArithmeticError, ValueError, LookupError, AssertionError):
        return None  # a combination of values that no plan has, from a foreign file
    low, high = BOUNDS[False]
    return ratio if low <= ratio <= high else None


def posterior(time: StepTime, seen: Sequence[Observed]) -> Posterior:
    low, high = _range(time)
    whole = max((math.log(high) - math.log(low)) / (2 * EDGE), LEAST_OWN)
    prior_own = min(max(OWN_SHARE * whole, LEAST_OWN), MOST_OWN * whole)
    shared2 = whole**2 - prior_own**2
    centre = _weighted_median(seen)
    jobs = sum(one.weight for one in seen)
    off = [Observed(abs(one.log_ratio - centre), one.weight) for one in seen]
    # A job that ran on a busy machine is far off. It must not make all others doubtful.
    most = FAR * max(prior_own, NORMAL * _weighted_median(off))
    scatter = sum(one.weight * min(one.log_ratio, most) ** 2 for one in off)
    own2 = (OWN_JOBS * prior_own**2 + scatter) / (OWN_JOBS + jobs)
    trust = shared2 / (shared2 + own2 / jobs)
    spread = EDGE * math.sqrt(shared2 * (1 - trust) + own2)
    least, most = BOUNDS[time.certainty not in (None, "guessed")]
    factor = min(max(math.exp(trust * centre), least), most)
    prior_centre = (math.log(low) + math.log(high)) / 2
    middle = math.log(factor) + (1 - trust) * prior_centre
    return Posterior(
        factor=factor,
        low=min(math.exp(middle - spread), factor),
        high=max(math.exp(middle + spread), factor),
    )


def _range(time: StepTime) -> tuple[float, float]:
    """The published range, relative to the predicted speed."""
    if time.tokens_per_second_per_device_range is None:
        return GUESSED
    low, high = time.tokens_per_second_per_device_range
    return low / time.tokens_per_second_per_device, high / time.tokens_per_second_per_device


def _weighted_median(seen: Sequence[Observed]) -> float:
    """Robust against a job that ran on a busy machine."""
    half, passed = sum(one.weight for one in seen) / 2, 0.0
    ordered = sorted(seen)
    for number, one in enumerate(ordered):
        passed += one.weight
        if math.isclose(passed, half) and number + 1 < len(ordered):
            return (one.log_ratio + ordered[number + 1].log_ratio) / 2
        if passed >= half:
            return one.log_ratio
    raise AssertionError("there is at least one observation")


def _time(time: StepTime, found: Posterior, correction: SpeedCorrection) -> StepTime:
    speed = time.tokens_per_second_per_device
    return replace(
        time,
        step_s=time.step_s / found.factor,
        tokens_per_second_per_device=speed * found.factor,
        mfu=time.mfu * found.factor,
        parts={part: seconds / found.factor for part, seconds in time.parts.items()},
        tokens_per_second_per_device_range=(speed * found.low, speed * found.high),
        correction=correction,
    )


def _scaled(plan: Plan, time: StepTime, factor: float) -> Plan:
    """All times of a plan change alike, because it is unknown which part of a step was wrong."""
    return replace(
        plan,
        time=time,
        communication=tuple(
            replace(one, seconds=one.seconds / factor, exposed_seconds=one.exposed_seconds / factor)
            for one in plan.communication
        ),
        alternatives=tuple(map(partial(scaled_choice, factor=factor), plan.alternatives)),
    )


def scaled_choice(choice: Choice, factor: float) -> Choice:
    """`choice` with its speed times `factor`."""
    return replace(
        choice,
        step_s=choice.step_s / factor,
        tokens_per_second_per_device=choice.tokens_per_second_per_device * factor,
        mfu=choice.mfu * factor,
    )

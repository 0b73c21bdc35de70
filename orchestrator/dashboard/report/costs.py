"""What an incident cost, and what the same failure took elsewhere where that was measured."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from orchestrator.job.incident import PREFLIGHT, Incident

Until = Literal[
    "until training went on", "until all ranks ran again", "until the job ended", "so far"
]


class Price(Struct, frozen=True, kw_only=True):
    per_gpu_hour: float
    origin: str
    """Where it comes from, as text."""


class Cost(Struct, frozen=True, kw_only=True):
    at: float
    """When it began."""
    down_s: float
    """From the failure to the first new step, or to the end of its launch, or until now."""
    recovered_at: float | None
    """When the job did its first new step, maybe in a later launch; None: it did none yet."""
    steps: int | None
    """Steps that were repeated; None if no rank ran, none reported a step, or none is repeated
    yet."""
    lost: int | None
    """At most so many steps are lost, while the job has not done a new step; else None."""
    repeated_s: float
    """Seconds that `steps` had taken; 0 if their duration is unknown."""
    gpus: int
    until: Until

    @property
    def is_over(self) -> bool:
        """The job trains again, or has ended."""
        return self.until != "so far"

    @property
    def seconds(self) -> float:
        return self.down_s + self.repeated_s

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.gpus / 3600


def cost_of(
    incident: Incident, until: float, step_s: float | None, gpus: int, *, ended: bool
) -> Cost:
    """
    Args:
        until: Unix time of the end of the incident's launch, or now. Between two launches the job
            does not exist, so the time after it costs nothing.
        step_s: seconds of a usual step; None: unknown.
        ended: that launch has ended.
    """
    recovered = incident.recovered_after_s
    # A program may report no steps.
    steps = incident.lost_steps if incident.step else None
    down_s = incident.resumed_after_s
    if down_s is None or (ended and incident.at + down_s > until):
        down_s = max(0.0, until - incident.at)
        ends: Until = "until the job ended" if ended else "so far"
    else:
        # Of a program without steps only its processes are known.
        ends = "until training went on" if recovered is not None else "until all ranks ran again"
    return Cost(
        at=incident.at,
        down_s=0.0 if incident.kind == PREFLIGHT else down_s,
        recovered_at=None if recovered is None else incident.at + recovered,
        steps=None if recovered is None else steps,
        lost=steps if recovered is None else None,
        repeated_s=(steps or 0) * (step_s or 0.0) if recovered is not None else 0.0,
        gpus=gpus,
        until=ends,
    )


def total_of(costs: Iterable[Cost]) -> Cost:
    """Of all incidents, at least one.

    The next incident may happen before the job trains again. Then the time until it trains, and the
    steps that are repeated, count once.
    """
    parts = sorted(costs, key=lambda one: one.at)
    repeated = list(_repeated_together(parts))
    return Cost(
        at=parts[0].at,
        down_s=_down_s(parts),
        recovered_at=parts[-1].recovered_at,
        steps=_of_known(sum, (one.steps for one in repeated)),
        lost=_of_known(max, (one.lost for one in parts)),
        repeated_s=sum(one.repeated_s for one in repeated),
        gpus=parts[0].gpus,
        until=next((one.until for one in parts if not one.is_over), parts[-1].until),
    )


def _down_s(parts: Iterable[Cost]) -> float:
    """Each second once."""
    total, reached = 0.0, -math.inf
    for one in parts:
        end = one.at + one.down_s
        total += max(0.0, end - max(one.at, reached))
        reached = max(reached, end)
    return total


def _repeated_together(parts: Iterable[Cost]) -> Iterator[Cost]:
    """Of the incidents from which the job recovered with the same step, the one that repeated the
    most steps."""
    group = list[Cost]()
    for one in parts:
        if one.recovered_at is None:
            continue
        if group and one.at >= (group[0].recovered_at or 0.0):
            yield max(group, key=lambda cost: cost.steps or 0)
            group.clear()
        group.append(one)
    if group:
        yield max(group, key=lambda cost: cost.steps or 0)


def _of_known(total: Callable[[Iterable[int]], int], numbers: Iterable[int | None]) -> int | None:
    known = [one for one in numbers if one is not None]
    return total(known) if known else None


class Measured(Struct, frozen=True, kw_only=True):
    """Seconds from a failure to the first new step, with the same trainer on the same machine."""

    way: str
    scope: str
    """`rank` or `host`: what failed."""
    other_s: float
    ndctl_s: float
    source: str
    """Where the measurement is written down."""
    remark: str = ""
    requeues: bool = False
    """ndctl gave the hosts back as well."""


MEASURED: Sequence[Measured] = (
    Measured(
        way="torchrun --max-restarts",
        scope="rank",
        other_s=7.8,
        ndctl_s=1.6,
        source="benchmarks/results/measurements.md, Recovery",
        remark="all its ranks were on one host",
    ),
    Measured(
        way="a batch job that requeues itself",
        scope="rank",
        other_s=136.0,
        ndctl_s=2.4,
        source="benchmarks/results/measurements.md, Slurm",
        remark="121 s of it are Slurm's default wait before a requeued job starts",
    ),
    Measured(
        way="sbatch --requeue",
        scope="host",
        other_s=23.7,
        ndctl_s=2.4,
        source="benchmarks/results/faults.md, Slurm, with a spare",
        remark="there a requeued job starts after 6 s; by default Slurm waits up to 120 s",
    ),
    Measured(
        way="sbatch --requeue",
        scope="host",
        other_s=23.7,
        ndctl_s=29.0,
        source="benchmarks/results/faults.md, Slurm, without a spare",
        remark="there a requeued job starts after 6 s; by default Slurm waits up to 120 s",
        requeues=True,
    ),
)
"""Means or medians of a few runs with a small model on CPUs: they tell differences, not what a
large job takes."""
NOT_MEASURED = (
    "A hang was not measured elsewhere. torch ends a collective after its own timeout, for NCCL 10"
    " minutes by default, and names no rank."
)


def elsewhere(incident: Incident) -> Iterator[Measured]:
    """The measurements that fit this failure; none for a hang."""
    if incident.kind == "hang" or incident.recovered_after_s is None:
        return
    scope = "rank" if incident.culprit.rank is not None else "host"
    requeued = incident.remedy == "requeue"
    for one in MEASURED:
        if one.scope == scope and (scope == "rank" or one.requeues == requeued):
            yield one


def estimated_s(cost: Cost, measured: Measured) -> float:
    """This incident with the other way to restart: its cost, and the measured difference."""
    return max(0.0, cost.seconds + measured.other_s - measured.ndctl_s)

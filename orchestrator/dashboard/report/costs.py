"""What an incident cost, and what the same failure took elsewhere where that was measured."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from orchestrator.job.incident import PREFLIGHT, Incident


class Price(Struct, frozen=True, kw_only=True):
    per_gpu_hour: float
    origin: str
    """Where it comes from, as text."""


class Cost(Struct, frozen=True, kw_only=True):
    down_s: float
    """From the failure to the first new step, or to the end of the job, or until now."""
    steps: int | None
    """Steps that were repeated; None if no rank ran."""
    repeated_s: float
    """Seconds that these steps had taken; 0 if their duration is unknown."""
    gpus: int
    is_over: bool
    """The job trains again, or has ended."""

    @property
    def seconds(self) -> float:
        return self.down_s + self.repeated_s

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.gpus / 3600


def cost_of(incident: Incident, until: float, step_s: float | None, gpus: int) -> Cost:
    """
    Args:
        until: Unix time of the end of the job, or now.
        step_s: seconds of a usual step; None: unknown.
    """
    recovered = incident.recovered_after_s
    down_s = max(0.0, until - incident.at) if recovered is None else recovered
    steps = incident.lost_steps
    return Cost(
        down_s=0.0 if incident.kind == PREFLIGHT else down_s,
        steps=steps,
        repeated_s=(steps or 0) * (step_s or 0.0) if recovered is not None else 0.0,
        gpus=gpus,
        is_over=recovered is not None,
    )


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

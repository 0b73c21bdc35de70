"""The metrics of ndctl: names, meanings and values. docs/monitoring.md lists them.

A job has one series per metric, or one per cause, class, state or health. Nothing has a series per
rank: a job of 16,384 ranks would fill a Prometheus by itself.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from orchestrator.contract.messages.events import JobSubmitted, WarningKind
from orchestrator.contract.visible import visible
from orchestrator.dashboard.job_view.health import Health
from orchestrator.dashboard.job_view.view import View, last_step
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.job.stage import State

JOB_LABELS = ("job_name", "run_root")
"""The labels of each series. `job` is the label that Prometheus gives to what it scrapes."""

Values = Iterable[tuple[tuple[str, ...], float]]
"""Values of further labels, each with the value of the series."""
Quantiles = Mapping[str, Mapping[float, float]]
"""Name of a figure of ranks -> quantile -> value."""


class Sample(Struct, frozen=True, kw_only=True):
    """What the values of a job's metrics are computed from."""

    job: ReadJob
    labels: tuple[str, str]
    """Values of `JOB_LABELS`."""
    view: View
    time: TimeSpent
    quantiles: Quantiles
    """Empty without the leader."""

    @staticmethod
    def of(job: ReadJob, quantiles: Quantiles) -> "Sample":
        return Sample(
            job=job,
            labels=(_safe(job.path.name), _safe(str(job.path.parent))),
            view=job.snapshot.view,
            time=job.time,
            quantiles=quantiles,
        )


class Family(Struct, frozen=True):
    name: str
    """Without `_total`."""
    help: str
    values: Callable[[Sample], Values]
    labels: tuple[str, ...] = ()
    counts: bool = False
    """It never falls: a counter."""


def _one(value: float | None) -> Values:
    """One series, or none if the value is unknown."""
    return () if value is None else (((), float(value)),)


def _states(sample: Sample) -> Values:
    return [((state,), float(state == sample.view.state)) for state in get_args(State)]


def _info(sample: Sample) -> Values:
    run = sample.job.snapshot.seen.run
    assert run.job is not None
    return [((run.job.backend, sample.job.owner, str(run.plan.split)), 1.0)]


def _lost(sample: Sample) -> Values:
    return [((cause,), seconds) for cause, seconds in sample.time.lost_s.items()]


def _incidents(sample: Sample) -> Values:
    counts = Counter((one.failure or one.kind, one.scope) for one in sample.view.incidents)
    return [(labels, float(count)) for labels, count in sorted(counts.items())]


def _warnings(sample: Sample) -> Values:
    counts = Counter(one.problem for one in sample.view.warnings)
    return [((problem,), float(counts[problem])) for problem in get_args(WarningKind)]


def _ranks(sample: Sample) -> Values:
    counts = Counter(rank for host in sample.view.hosts for rank in host.ranks)
    return [((health,), float(counts[health])) for health in get_args(Health)]


def _quantiles(name: str) -> Callable[[Sample], Values]:
    return lambda sample: [
        ((f"{quantile:g}",), value) for quantile, value in sample.quantiles.get(name, {}).items()
    ]


def _last(name: str) -> Callable[[Sample], Values]:
    return lambda sample: _one(getattr(sample.job.snapshot.progress.last, name, None))


FAMILIES: tuple[Family, ...] = (
    Family(
        "ndctl_job_info",
        "Always 1. Backend and owner of the job, and how its ranks split the work.",
        _info,
        ("backend", "user", "split"),
    ),
    Family(
        "ndctl_job_state",
        "1 for the state of the job, 0 for the other states.",
        _states,
        ("state",),
    ),
    Family(
        "ndctl_job_state_since_timestamp_seconds",
        "Unix time at which the job entered its state.",
        lambda sample: _one(sample.job.snapshot.standing.since),
    ),
    Family(
        "ndctl_job_heard_timestamp_seconds",
        "Unix time of the last journal line or step.",
        lambda sample: _one(sample.job.snapshot.heard_at),
    ),
    Family(
        "ndctl_attempt",
        "Number of the present attempt; 0 before the first.",
        lambda sample: _one(sample.view.attempt),
    ),
    Family(
        "ndctl_hosts",
        "Hosts of the present attempt, or of the plan before the first.",
        lambda sample: _one(len(sample.view.hosts)),
    ),
    Family("ndctl_ranks", "Ranks by health, as in `ndctl dashboard`.", _ranks, ("health",)),
    Family(
        "ndctl_step",
        "The last optimizer step that is done.",
        lambda sample: _one(last_step(sample.job.snapshot.seen.run, sample.job.snapshot.progress)),
    ),
    Family(
        "ndctl_steps",
        "Optimizer steps of the whole job; absent if their number is unknown.",
        lambda sample: _one(sample.view.steps or None),
    ),
    Family(
        "ndctl_step_seconds",
        "Seconds per step at present, with checkpoints.",
        lambda sample: _one(sample.view.step_s),
    ),
    Family(
        "ndctl_eta_seconds",
        "Expected seconds to the last step; absent unless the job trains and has steps left.",
        lambda sample: _one(sample.view.eta_s),
    ),
    Family("ndctl_loss", "Loss of the last step.", _last("loss")),
    Family(
        "ndctl_tokens_per_second",
        "Tokens per second of the whole job in the last step.",
        _last("tokens_per_second"),
    ),
    Family(
        "ndctl_mfu",
        "Model FLOPS utilisation of the last step, 0 to 1; absent if the peak is unknown.",
        _last("mfu"),
    ),
    Family("ndctl_peak_memory_bytes", "Peak memory of rank 0.", _last("peak_memory_bytes")),
    Family(
        "ndctl_gpu_utilization_ratio",
        "GPU utilisation of rank 0, 0 to 1.",
        _last("gpu_utilization"),
    ),
    Family(
        "ndctl_effective_time_ratio",
        "Training that counts, divided by the time since submission, 0 to 1.",
        lambda sample: _one(sample.time.ratio),
    ),
    Family(
        "ndctl_elapsed_seconds",
        "Time since submission, without the time between two launches.",
        lambda sample: _one(sample.time.elapsed_s),
        counts=True,
    ),
    Family(
        "ndctl_lost_seconds",
        "Time that is not training that counts, by cause.",
        _lost,
        ("cause",),
        counts=True,
    ),
    Family(
        "ndctl_incidents",
        "Incidents by failure class and scope.",
        _incidents,
        ("class", "scope"),
        counts=True,
    ),
    Family(
        "ndctl_restarts",
        "Restarts of all ranks.",
        lambda sample: _one(sample.view.restarts),
        counts=True,
    ),
    Family(
        "ndctl_restarts_without_checkpoint",
        "Restarts since the newest checkpoint, which the budget limits.",
        lambda sample: _one(sample.job.snapshot.seen.run.history.fruitless),
    ),
    Family(
        "ndctl_restarts_allowed",
        "Most restarts without a new checkpoint: resilience.max_restarts.",
        lambda sample: _one(_submitted(sample).max_restarts),
    ),
    Family(
        "ndctl_checkpoint_step",
        "Step of the newest complete checkpoint; 0 if there is none.",
        lambda sample: _one(sample.view.checkpoint.step),
    ),
    Family(
        "ndctl_checkpoint_timestamp_seconds",
        "Unix time at which the newest checkpoint was complete; absent if it is unknown.",
        lambda sample: _one(sample.view.checkpoint.at),
    ),
    Family(
        "ndctl_checkpoint_failed_saves",
        "Failed saves since the last one that succeeded.",
        lambda sample: _one(
            sample.view.checkpoint.failed.times if sample.view.checkpoint.failed else 0
        ),
    ),
    Family(
        "ndctl_checkpoint_pause_seconds",
        "Time for which the last save paused training; absent before the first.",
        lambda sample: _one(sample.job.last_pause_s),
    ),
    Family(
        "ndctl_stragglers",
        "Ranks that make their peers wait at present.",
        lambda sample: _one(len(sample.view.stragglers)),
    ),
    Family(
        "ndctl_host_warnings",
        "Hosts that warn of their own failure at present, by problem.",
        _warnings,
        ("problem",),
    ),
    Family(
        "ndctl_rank_heartbeat_age_seconds",
        "Seconds since ranks were last heard, by quantile. From the leader alone.",
        _quantiles("heartbeat_age"),
        ("quantile",),
    ),
    Family(
        "ndctl_rank_own_step_seconds",
        "A rank's own work per step, without waiting for others, by quantile."
        " From the leader alone.",
        _quantiles("own_step"),
        ("quantile",),
    ),
    Family(
        "ndctl_host_memory_checkpoint_bytes",
        "Memory that checkpoints take on hosts, with copies for other hosts, by quantile."
        " From the leader alone.",
        _quantiles("memory_bytes"),
        ("quantile",),
    ),
    Family(
        "ndctl_host_memory_checkpoint_copies",
        "Complete copies of checkpoints of other hosts' ranks that hosts hold, by quantile."
        " From the leader alone.",
        _quantiles("memory_held"),
        ("quantile",),
    ),
    Family(
        "ndctl_host_memory_checkpoint_damaged_copies",
        "Copies that hosts fetched from partners and that had changed, by quantile."
        " From the leader alone.",
        _quantiles("memory_damaged"),
        ("quantile",),
    ),
    Family(
        "ndctl_host_memory_checkpoint_copy_age_seconds",
        "Seconds since partners last got a copy of hosts' checkpoints in memory, by quantile."
        " From the leader alone.",
        _quantiles("memory_copy_age"),
        ("quantile",),
    ),
)


def _submitted(sample: Sample) -> JobSubmitted:
    job = sample.job.snapshot.seen.run.job
    assert job is not None
    return job


class Floor:
    """Keeps counters from falling. A line of metrics that arrives late may move seconds from one
    cause to another, and Prometheus takes a lower value for a restart of the counter."""

    def __init__(self) -> None:
        self.highest: dict[tuple[str, ...], float] = {}

    def __call__(self, key: tuple[str, ...], value: float) -> float:
        self.highest[key] = max(value, self.highest.get(key, value))
        return self.highest[key]

    def keep(self, keys: set[tuple[str, ...]]) -> None:
        """Forget all but `keys`."""
        self.highest = {key: self.highest[key] for key in self.highest.keys() & keys}


def families_of(
    samples: Sequence[Sample], unreadable: int, strikes: Values, floor: Floor
) -> Iterator[Metric]:
    """All metrics of these jobs."""
    used: set[tuple[str, ...]] = set()
    for family in FAMILIES:
        labels = (*JOB_LABELS, *family.labels)
        kind = CounterMetricFamily if family.counts else GaugeMetricFamily
        made = kind(family.name, family.help, labels=labels)
        for sample in samples:
            for more, value in family.values(sample):
                names = (*sample.labels, *map(_safe, more))
                if family.counts:
                    used.add(key := (family.name, *names))
                    value = floor(key, value)
                made.add_metric(names, value)
        yield made
    floor.keep(used)
    broken = GaugeMetricFamily("ndctl_unreadable_jobs", "Jobs whose journal cannot be read.")
    broken.add_metric((), unreadable)
    yield broken
    struck = GaugeMetricFamily(
        "ndctl_host_strikes",
        "Sum of the strikes against a host, which fade with time.",
        labels=("run_root", "cluster", "host"),
    )
    for names, value in strikes:
        struck.add_metric(tuple(map(_safe, names)), value)
    yield struck


def _safe(text: str) -> str:
    """Label values are UTF-8, and names on a disk need not be."""
    return visible(text)

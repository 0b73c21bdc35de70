"""The metrics of ndctl: names, meanings and values. docs/monitoring.md lists them.

A job has one series per metric, or one per cause, class, state or health. Nothing has a series per
rank: a job of 16,384 ranks would fill a Prometheus by itself.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from msgspec import Struct, field
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.visible import visible
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.dashboard.view import Health, View, last_step
from orchestrator.job.stage import State

JOB_LABELS = ("job_name", "run_root")
"""The labels of each series. `job` is the label that Prometheus gives to what it scrapes."""

Values = Iterable[tuple[tuple[str, ...], float]]
"""Values of further labels, each with the value of the series."""


Quantiles = Mapping[str, Mapping[float, float]]


class Sample(Struct, frozen=True, kw_only=True):
    """What the values of a job's metrics are computed from."""

    job: ReadJob
    view: View
    quantiles: Quantiles = field(default_factory=dict)
    """Name of a figure of ranks -> quantile -> value; empty without the leader."""


class Family(Struct, frozen=True, kw_only=True):
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
    return [((cause,), seconds) for cause, seconds in sample.job.time.lost_s.items()]


def _incidents(sample: Sample) -> Values:
    counts = Counter((one.failure or one.kind, one.scope) for one in sample.view.incidents)
    return [(labels, float(count)) for labels, count in sorted(counts.items())]


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
        name="ndctl_job_info",
        help="Always 1. Backend and owner of the job, and how its ranks split the work.",
        labels=("backend", "user", "split"),
        values=_info,
    ),
    Family(
        name="ndctl_job_state",
        help="1 for the state of the job, 0 for the other states.",
        labels=("state",),
        values=_states,
    ),
    Family(
        name="ndctl_job_state_since_timestamp_seconds",
        help="Unix time at which the job entered its state.",
        values=lambda sample: _one(sample.job.snapshot.standing.since),
    ),
    Family(
        name="ndctl_job_heard_timestamp_seconds",
        help="Unix time of the last journal line or step.",
        values=lambda sample: _one(sample.job.snapshot.heard_at),
    ),
    Family(
        name="ndctl_attempt",
        help="Number of the present attempt; 0 before the first.",
        values=lambda sample: _one(sample.view.attempt),
    ),
    Family(
        name="ndctl_hosts",
        help="Hosts of the present attempt, or of the plan before the first.",
        values=lambda sample: _one(len(sample.view.hosts)),
    ),
    Family(
        name="ndctl_ranks",
        help="Ranks by health, as in `ndctl dashboard`.",
        labels=("health",),
        values=_ranks,
    ),
    Family(
        name="ndctl_step",
        help="The last optimizer step that is done.",
        values=lambda sample: _one(
            last_step(sample.job.snapshot.seen.run, sample.job.snapshot.progress)
        ),
    ),
    Family(
        name="ndctl_steps",
        help="Optimizer steps of the whole job; absent if their number is unknown.",
        values=lambda sample: _one(sample.view.steps or None),
    ),
    Family(
        name="ndctl_step_seconds",
        help="Seconds per step at present, with checkpoints.",
        values=lambda sample: _one(sample.view.step_s),
    ),
    Family(
        name="ndctl_eta_seconds",
        help="Expected seconds to the last step; absent unless the job trains.",
        values=lambda sample: _one(sample.view.eta_s),
    ),
    Family(name="ndctl_loss", help="Loss of the last step.", values=_last("loss")),
    Family(
        name="ndctl_tokens_per_second",
        help="Tokens per second of the whole job in the last step.",
        values=_last("tokens_per_second"),
    ),
    Family(
        name="ndctl_mfu",
        help="Model FLOPS utilisation of the last step, 0 to 1; absent if the peak is unknown.",
        values=_last("mfu"),
    ),
    Family(
        name="ndctl_peak_memory_bytes",
        help="Peak memory of rank 0.",
        values=_last("peak_memory_bytes"),
    ),
    Family(
        name="ndctl_gpu_utilization_ratio",
        help="GPU utilisation of rank 0, 0 to 1.",
        values=_last("gpu_utilization"),
    ),
    Family(
        name="ndctl_effective_time_ratio",
        help="Training that counts, divided by the time since submission, 0 to 1.",
        values=lambda sample: _one(sample.job.time.ratio),
    ),
    Family(
        name="ndctl_elapsed_seconds",
        help="Time since submission, without the time between two launches.",
        counts=True,
        values=lambda sample: _one(sample.job.time.elapsed_s),
    ),
    Family(
        name="ndctl_lost_seconds",
        help="Time that is not training that counts, by cause.",
        labels=("cause",),
        counts=True,
        values=_lost,
    ),
    Family(
        name="ndctl_incidents",
        help="Incidents by failure class and scope.",
        labels=("class", "scope"),
        counts=True,
        values=_incidents,
    ),
    Family(
        name="ndctl_restarts",
        help="Restarts of all ranks.",
        counts=True,
        values=lambda sample: _one(sample.view.restarts),
    ),
    Family(
        name="ndctl_restarts_without_checkpoint",
        help="Restarts since the newest checkpoint, which the budget limits.",
        values=lambda sample: _one(sample.job.snapshot.seen.run.history.fruitless),
    ),
    Family(
        name="ndctl_restarts_allowed",
        help="Most restarts without a new checkpoint: resilience.max_restarts.",
        values=lambda sample: _one(_submitted(sample).max_restarts),
    ),
    Family(
        name="ndctl_checkpoint_step",
        help="Step of the newest complete checkpoint; 0 if there is none.",
        values=lambda sample: _one(sample.view.checkpoint.step),
    ),
    Family(
        name="ndctl_checkpoint_timestamp_seconds",
        help="Unix time at which the newest checkpoint was complete; absent if it is unknown.",
        values=lambda sample: _one(sample.view.checkpoint.at),
    ),
    Family(
        name="ndctl_checkpoint_failed_saves",
        help="Failed saves since the last one that succeeded.",
        values=lambda sample: _one(
            sample.view.checkpoint.failed.times if sample.view.checkpoint.failed else 0
        ),
    ),
    Family(
        name="ndctl_checkpoint_pause_seconds",
        help="Time for which the last save paused training; absent before the first.",
        values=lambda sample: _one(sample.job.pauses[-1].seconds if sample.job.pauses else None),
    ),
    Family(
        name="ndctl_stragglers",
        help="Ranks that make their peers wait at present.",
        values=lambda sample: _one(len(sample.view.stragglers)),
    ),
    Family(
        name="ndctl_rank_heartbeat_age_seconds",
        help="Seconds since ranks were last heard, by quantile. From the leader alone.",
        labels=("quantile",),
        values=_quantiles("heartbeat_age"),
    ),
    Family(
        name="ndctl_rank_own_step_seconds",
        help="A rank's own work per step, without waiting for others, by quantile."
        " From the leader alone.",
        labels=("quantile",),
        values=_quantiles("own_step"),
    ),
    Family(
        name="ndctl_host_memory_checkpoint_bytes",
        help="Memory that checkpoints take on hosts, with copies for other hosts, by quantile."
        " From the leader alone.",
        labels=("quantile",),
        values=_quantiles("memory_bytes"),
    ),
    Family(
        name="ndctl_host_memory_checkpoint_copies",
        help="Complete copies of checkpoints of other hosts' ranks that hosts hold, by quantile."
        " From the leader alone.",
        labels=("quantile",),
        values=_quantiles("memory_held"),
    ),
    Family(
        name="ndctl_host_memory_checkpoint_copy_age_seconds",
        help="Seconds since partners last got a copy of hosts' checkpoints in memory, by quantile."
        " From the leader alone.",
        labels=("quantile",),
        values=_quantiles("memory_copy_age"),
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
            place = _labels(sample.job)
            for more, value in family.values(sample):
                names = (*place, *map(_safe, more))
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


def _labels(job: ReadJob) -> tuple[str, str]:
    return _safe(job.path.name), _safe(str(job.path.parent))


def _safe(text: str) -> str:
    """Label values are UTF-8, and names on a disk need not be."""
    return visible(text)

"""The step time and the peak memory that a job measured, from `metrics.jsonl`.

Only steady steps count: not the first ones of an attempt, which compile and fill caches, and not
those right after a checkpoint. Restarts are between two attempts, so they are in no step.
"""

import itertools
import statistics
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator.dashboard.metrics import Metric, lines_backwards, parse_metric
from orchestrator.job.state import Run

WARM_UP = 5
"""Steps at the start of an attempt that do not count."""
FEWEST = 5
"""Steady steps that a median needs."""
LINES = 512
"""Lines at the end of the file that are read."""


class Steady(Struct, frozen=True, kw_only=True):
    steps: int
    """Number of steady steps."""
    step_s: float
    """Their median."""
    step_s_range: tuple[float, float]
    """10th and 90th percentile of single steps."""
    data_share: float = 0.0
    """Median share of a step in which rank 0 waited for its data, 0 to 1."""
    memory_bytes: int | None = None
    """Peak memory of the fullest rank: of the GPU's allocator, or of the process on a CPU; None:
    the ranks have not compared yet."""
    memory_rank: int | None = None


def read_steady(path: Path, attempts: Collection[int] | None) -> Steady | None:
    """What the newest lines of the file say.

    Args:
        attempts: the attempts that count; None: all.

    Returns:
        None if there are fewer than `FEWEST` steady steps.
    """
    newest = list(itertools.islice(_metrics_backwards(path), LINES))
    return steady_of(newest[::-1], attempts, begins=len(newest) < LINES)


def _metrics_backwards(path: Path) -> Iterator[Metric]:
    return (metric for line in lines_backwards(path) if (metric := parse_metric(line)) is not None)


def steady_of(
    metrics: Sequence[Metric], attempts: Collection[int] | None, *, begins: bool
) -> Steady | None:
    """As `read_steady`. `begins`: the first of `metrics` is the first line of its attempt."""
    steady: list[Metric] = []
    memory: Metric | None = None
    for attempt, lines in itertools.groupby(metrics, key=lambda metric: metric.attempt):
        group = list(lines)
        cut, begins = (WARM_UP if begins else 0), True
        if attempts is not None and attempt not in attempts:
            continue
        steady += [one for one in group[cut:] if one.step_s and not one.checkpoint_s]
        # A peak only grows within an attempt.
        memory = max(
            (one for one in (memory, group[-1]) if one and one.fullest_memory_bytes),
            key=lambda one: one.fullest_memory_bytes or 0,
            default=None,
        )
    if len(steady) < FEWEST:
        return None
    seconds = sorted(one.step_s for one in steady if one.step_s)
    return Steady(
        steps=len(seconds),
        step_s=statistics.median(seconds),
        step_s_range=(_percentile(seconds, 0.1), _percentile(seconds, 0.9)),
        data_share=statistics.median((one.data_s or 0.0) / (one.step_s or 1.0) for one in steady),
        memory_bytes=_whole(memory.fullest_memory_bytes) if memory else None,
        memory_rank=_whole(memory.fullest_rank) if memory else None,
    )


def _percentile(values: Sequence[float], share: float) -> float:
    """`values` are sorted."""
    return values[round(share * (len(values) - 1))]


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def attempts_of_plan(run: Run) -> tuple[int, ...] | None:
    """The attempts that surely followed the present plan; None: all attempts did.

    After a change of the plan, or a new submission, only the present attempt is sure to.
    """
    plans, job = run.plans, run.job
    is_first = plans.replanned is None and plans.refitted is None and plans.grown_at is None
    if job is not None and not job.resume and is_first:
        return None
    return (run.attempt.number,)

"""Published training runs beside the planner's speed and memory for them."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.published.runs import Run
from orchestrator.plan.accuracy import axes_of, length_of
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.memory.peak_memory import memory_of


class Compared(NamedTuple):
    run: Run
    planned: float
    """Tokens per second and device."""
    memory_bytes: int | None
    """Planned, as torch's allocator counts; None: nothing is published."""

    @property
    def error(self) -> float:
        return self.planned / self.run.tokens_per_second_per_device - 1

    @property
    def ratio(self) -> float:
        """Published relative to planned."""
        return self.run.tokens_per_second_per_device / self.planned

    @property
    def source(self) -> str:
        return self.run.source.name

    @property
    def architecture(self) -> str:
        return self.run.fabric.profile.calibration.architecture

    @property
    def axes(self) -> str:
        return axes_of(self.run.setup.mesh)

    @property
    def length(self) -> int:
        return length_of(self.run.setup.tokens)


def compare(some: Iterable[Run]) -> list[Compared]:
    return [
        Compared(
            run=run,
            planned=step_time(run.setup, run.fabric).tokens_per_second_per_device,
            memory_bytes=_allocated(run) if run.memory_bytes else None,
        )
        for run in some
    ]


def _allocated(run: Run) -> int:
    return memory_of(run.setup, run.fabric).tensor_bytes


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def mean_error(group: Iterable[Compared]) -> float:
    return mean([abs(one.error) for one in group])

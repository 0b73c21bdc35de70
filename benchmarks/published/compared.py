"""Published training runs beside the planner's speed and memory for them."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.published.methods import added_s
from benchmarks.published.runs import Run
from orchestrator.plan.accuracy import Group, axes_of, group_of, length_of
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

    @property
    def group(self) -> Group:
        return group_of(self.run.setup.mesh, self.run.fabric.hosts)


def compare(some: Iterable[Run]) -> list[Compared]:
    return [
        Compared(
            run=run,
            planned=_planned(run),
            memory_bytes=_allocated(run) if run.memory_bytes else None,
        )
        for run in some
    ]


def _planned(run: Run) -> float:
    planned = step_time(run.setup, run.fabric)
    share = planned.step_s / (planned.step_s + added_s(run))
    return share * planned.tokens_per_second_per_device


def _allocated(run: Run) -> int:
    return memory_of(run.setup, run.fabric).tensor_bytes


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def mean_error(group: Iterable[Compared]) -> float:
    return mean([abs(one.error) for one in group])

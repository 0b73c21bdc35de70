"""Memory of a rank from the start to the end of a step, for a picture.

Between two points of `timeline.py` memory grows or shrinks steadily, so a line between them is the
memory in between. The picture shows one micro batch at the fullest moment of the schedule, and the
update after the last one. The width of a phase is not its duration.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from orchestrator.contract.plan import Memory, Plan
from orchestrator.plan.memory.peak_memory import boundary_bytes, ranks_of
from orchestrator.plan.memory.states import States, states_of, units_of, update_bytes
from orchestrator.plan.memory.timeline import Point, Usage, points_of
from orchestrator.plan.setup import Setup

FORWARD, LOSS, BACKWARD, UPDATE = 0.30, 0.38, 0.86, 0.92
"""Where the phases end, as shares of the width; the update begins at `UPDATE`."""
RESERVE = ("communication", "context", "slack")
"""Items of `reserve.py`, which do not change in a step."""
PHASES = ("forward", "loss", "backward", "end")


class Sample(Struct, frozen=True, kw_only=True):
    at: float
    """Share of the width, from 0 to 1."""
    when: str
    """What happens, as text."""
    items: Mapping[str, int]
    """Bytes by purpose, as in `Memory`."""

    @property
    def total(self) -> int:
        return sum(self.items.values())


class MemoryOverStep(Struct, frozen=True, kw_only=True):
    memory: Memory
    """Of this rank at its peak."""
    samples: tuple[Sample, ...]


def over_step(setup: Setup, plan: Plan) -> tuple[MemoryOverStep, ...]:
    """For every rank along pp, or for the only kind of rank; `setup` is that of `plan`."""
    ranks = ranks_of(setup)
    memories = plan.memory_along_pp or (plan.needs,)
    found = []
    for rank, memory in zip(ranks, memories, strict=True):
        units = units_of(setup, rank)
        states = states_of(setup, rank, units)
        kept = {
            "parameters": states.parameters,
            "optimizer": states.optimizer,
            "boundaries": boundary_bytes(setup, rank),
            **{item: memory.items[item] for item in RESERVE if item in memory.items},
        }
        points = points_of(setup, rank, units, states)
        samples = [
            Sample(at=at, when=when, items=_items(kept, usage))
            for at, when, usage in (
                *_pass(points, max(1, units.layers)),
                *_update(setup, states, points),
            )
        ]
        found.append(MemoryOverStep(memory=memory, samples=tuple(samples)))
    return tuple(found)


def _pass(points: Sequence[Point], layers: int) -> Iterator[tuple[float, str, Usage]]:
    """The points of a micro batch, after a start at which each item has its least."""
    usages = [point.usage for point in points]
    least = Usage(
        gradients=min(usage.gradients for usage in usages),
        gathered=min(usage.gathered for usage in usages),
        activations=min(usage.activations for usage in usages),
    )
    yield 0.0, "start of the forward pass", least
    for phase in PHASES:
        own = sorted((point for point in points if point.when == phase), key=lambda one: one.done)
        for number, point in enumerate(own):
            yield _place(point, layers, (number + 1) / len(own))


def _place(point: Point, layers: int, share: float) -> tuple[float, str, Usage]:
    """`share`: which of the points of its phase it is."""
    match point.when:
        case "forward":
            return FORWARD, "end of the forward pass", point.usage
        case "loss":
            return FORWARD + (LOSS - FORWARD) * share, "head and loss", point.usage
        case "backward":
            said = f"backward pass, {point.done} of {layers} layers done"
            return LOSS + (BACKWARD - LOSS) * point.done / layers, said, point.usage
        case "end":
            return BACKWARD, "end of the backward pass", point.usage


def _update(
    setup: Setup, states: States, points: Sequence[Point]
) -> Iterator[tuple[float, str, Usage]]:
    usage = Usage(gradients=states.gradients, temporary=update_bytes(setup, states))
    if states.host:
        # The optimizer works in host memory.
        usage = Usage(gradients=min(point.usage.gradients for point in points))
    yield UPDATE, "update", usage
    yield 1.0, "update", usage


def _items(kept: Mapping[str, int], usage: Usage) -> dict[str, int]:
    # A correction is negative: parts of two items do not exist at the same time.
    temporary = usage.temporary + usage.correction
    activations = usage.activations + min(0.0, temporary)
    moving = {
        "gradients": usage.gradients,
        "gathered": usage.gathered,
        "activations": activations,
        "logits": usage.logits,
        "temporary": max(0.0, temporary),
    }
    items = {**kept, **{name: math.ceil(size) for name, size in moving.items()}}
    return {name: size for name, size in items.items() if size}

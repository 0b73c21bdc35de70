"""A job's plan beside what the job measured, as text and as JSON."""

from collections.abc import Iterator
from typing import Any

from orchestrator.contract.plan import Plan
from orchestrator.dashboard import format
from orchestrator.dashboard.measured.steady import Steady

DATA = 0.05
"""From this share of a step on, waiting for data is mentioned: no plan contains it."""


def measured_json(plan: Plan, steady: Steady | None) -> dict[str, Any] | None:
    """None without enough steady steps, and for the user's own program, which has no plan."""
    if steady is None or plan.is_own:
        return None
    planned, memory = plan.time, plan.needs
    compared = is_comparable(plan) and steady.memory_bytes is not None
    return {
        "steps": steady.steps,
        "step_s": steady.step_s,
        "step_s_range": list(steady.step_s_range),
        "data_share": steady.data_share,
        "planned_step_s": None if planned is None else planned.step_s,
        "planned_step_s_range": _range(plan),
        "calibrated": is_calibrated(plan),
        "slower": slower(plan, steady),
        "memory_bytes": steady.memory_bytes,
        "memory_rank": steady.memory_rank,
        "planned_memory_bytes": memory.tensor_bytes if compared else None,
        "memory_above": memory_above(plan, steady),
    }


def measured_rows(plan: Plan, steady: Steady | None) -> Iterator[tuple[str, str]]:
    """Label and text of each line of `ndctl status`."""
    if steady is None or plan.is_own:
        return
    if plan.time is not None:
        yield "step time", _step_time(plan, steady)
    if steady.memory_bytes is not None:
        yield "memory", _memory(plan, steady)


def is_calibrated(plan: Plan) -> bool:
    """The constants of the device are more than guesses, so a difference says something."""
    return plan.time is not None and plan.time.certainty not in (None, "guessed")


def is_comparable(plan: Plan) -> bool:
    """The measured memory is that of tensors, like the plan's. On a CPU it is that of the whole
    process, with Python and torch."""
    return plan.memory is not None and plan.memory.tensor_bytes < plan.memory.peak_bytes


def slower(plan: Plan, steady: Steady) -> float | None:
    """By which share a step takes longer than planned; negative: it is faster. None: a plan whose
    constants are guesses cannot be compared."""
    if plan.time is None or not is_calibrated(plan):
        return None
    return steady.step_s / plan.time.step_s - 1


def memory_above(plan: Plan, steady: Steady) -> float | None:
    """By which share the fullest rank needs more memory for tensors than planned."""
    if steady.memory_bytes is None or not is_comparable(plan):
        return None
    return steady.memory_bytes / plan.needs.tensor_bytes - 1


def _range(plan: Plan) -> list[float] | None:
    """Seconds per step at both ends of the planned range."""
    time = plan.time
    if time is None or time.tokens_per_second_per_device_range is None:
        return None
    low, high = time.tokens_per_second_per_device_range
    return [time.step_s * time.tokens_per_second_per_device / speed for speed in (high, low)]


def _step_time(plan: Plan, steady: Steady) -> str:
    assert plan.time is not None
    many = f"median of {format.count(steady.steps, 'steady step')}"
    said = f"{_seconds(steady.step_s)} ({many}), planned {_seconds(plan.time.step_s)}"
    off = slower(plan, steady)
    if off is None:
        return (
            f"{said}; no percentage, because the constants of {plan.profile} are guesses:"
            " `ndctl calibrate` measures them"
        )
    said += f": {_off(off, 'slower', 'faster', 'long')}"
    if (planned := _range(plan)) is not None:
        inside = planned[0] <= steady.step_s <= planned[1]
        said += f", {'inside' if inside else 'outside'} the plan's range"
    if steady.data_share >= DATA:
        said += f"; {steady.data_share:.0%} of a step is waiting for data, which no plan contains"
    return said


def _memory(plan: Plan, steady: Steady) -> str:
    assert steady.memory_bytes is not None
    said = f"{format.size(steady.memory_bytes)} on the fullest rank, {steady.memory_rank}"
    tensors = format.size(plan.needs.tensor_bytes)
    off = memory_above(plan, steady)
    if off is None:
        return f"{said}, of the process with Python and torch; planned {tensors} of tensors alone"
    return f"{said}, planned {tensors} of tensors: {_off(off, 'more', 'less', 'much')}"


def _off(share: float, above: str, below: str, extent: str) -> str:
    if share >= 1:  # `26125.8% more` is hard to read
        return f"{_three(1 + share)} times as {extent}"
    return f"{abs(share):.1%} {above if share > 0 else below}"


def _seconds(seconds: float) -> str:
    """Three digits, because a difference of some percent must be visible."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e6)} us"


def _three(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def describe_rows(plan: Plan, steady: Steady | None) -> Iterator[tuple[str, str]]:
    """More of the same for `ndctl describe`."""
    if steady is None or plan.is_own:
        return
    low, high = map(_seconds, steady.step_s_range)
    yield "steps", f"8 of 10 steady steps take {low} to {high}"
    if (planned := _range(plan)) is not None:
        yield "planned", f"{_seconds(planned[0])} to {_seconds(planned[1])} per step"
    yield "data", f"{steady.data_share:.1%} of a step is waiting for data"

"""How far a predicted speed may be off, from published runs that the planner predicts as well."""

from typing import NamedTuple

from orchestrator.contract.mesh import Mesh
from orchestrator.inventory.calibration import Calibration, ErrorRange
from orchestrator.plan.setup import Setup

SPLITTING = ("tp", "cp", "pp")
"""Axes that change how a layer or a step is computed. Data parallelism is in every run."""
LENGTHS = (8192, 32768, 10**9)
"""Longest sequences of each class of lengths. The last class has no limit."""
GUESSED = (0.5, 1.5)
"""Share of the predicted speed, if the constants of the device are guesses, or the model has
experts. An estimate."""

CALIBRATED = (0.6, 1.4)
"""The same, if `ndctl calibrate` measured a device of which no run is published. An estimate."""


class SpeedRange(NamedTuple):
    low: float
    """Relative to the predicted speed."""
    high: float
    basis: str


def axes_of(mesh: Mesh) -> str:
    """The axes in use besides data parallelism, such as `tp pp`."""
    return " ".join(axis for axis in SPLITTING if getattr(mesh, axis) > 1)


def length_of(tokens: int) -> int:
    """The class of lengths, one of `LENGTHS`."""
    return next(most for most in LENGTHS if tokens <= most)


def speed_range(setup: Setup, calibration: Calibration) -> SpeedRange:
    """The range of the most similar published runs."""
    if calibration.certainty == "guessed":
        low, high = GUESSED
        return SpeedRange(
            low, high, "no run like this is published, and the constants of the device are guesses"
        )
    if calibration.certainty == "calibrated" and calibration.ranges[0].architecture == "any":
        low, high = CALIBRATED
        return SpeedRange(
            low, high, "no run like this is published; `ndctl calibrate` measured the device"
        )
    if setup.shape.num_experts:
        return SpeedRange(*GUESSED, "no run of a model with experts is published")
    found = _most_similar(setup, calibration)
    if setup.lora is not None:
        every = calibration.ranges[-1]
        basis = f"no run with adapters is published; range of all {every.runs} published runs"
        # Less is known than of the same plan without adapters.
        return SpeedRange(min(every.low, found.low), max(every.high, found.high), basis)
    return SpeedRange(found.low, found.high, _basis(found))


def _most_similar(setup: Setup, calibration: Calibration) -> ErrorRange:
    axes = axes_of(setup.mesh)
    for found in calibration.ranges:
        if found.axes in (axes, "any") and found.tokens in (length_of(setup.tokens), 0):
            return found
    raise AssertionError("calibration/ranges.toml ends with the range of all runs")


def _basis(found: ErrorRange) -> str:
    axes = found.axes or "data parallelism only"
    if found.architecture == "any":
        like = "" if found.axes == "any" else f" with {axes}"
        return f"no run like this is published; range of all {found.runs} published runs{like}"
    if found.tokens:
        last = found.tokens == LENGTHS[-1]
        length = f"over {LENGTHS[-2]:,} tokens" if last else f"up to {found.tokens:,} tokens"
        comparable = f"{found.runs} comparable published runs"
        return f"{comparable} ({found.architecture}, {axes}, {length})"
    return f"{found.runs} published runs on {found.architecture} with {axes}, of other lengths"

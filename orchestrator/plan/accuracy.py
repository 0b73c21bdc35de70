"""How far a predicted speed may be off, from published runs that the planner predicts as well."""

from typing import Literal, NamedTuple

from orchestrator.contract.mesh import Mesh
from orchestrator.inventory.calibration import Calibration
from orchestrator.plan.setup import Setup

SPLITTING = ("tp", "cp", "pp")
"""Axes that change how a layer or a step is computed. Data parallelism is in every run."""
LENGTHS = (8192, 32768, 10**9)
"""Longest sequences of each class of lengths. The last class has no limit."""
Group = Literal[
    "one host", "several hosts with data parallelism only", "several hosts with tp, cp or pp"
]
"""Published runs of a group share one range. Finer groups, by device, axes or length, did not
predict the errors of sources that were left out better."""
GUESSED = (0.5, 1.5)
"""Share of the predicted speed, if the constants of the device are guesses, or the model has
experts. An estimate."""

CALIBRATED = (0.6, 1.4)
"""The same, if `ndctl calibrate` measured a device of which no run is published. An estimate."""
WIDE = 1.4
"""Ranges that are at least so many times as wide say why."""


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


def group_of(mesh: Mesh, hosts: int) -> Group:
    if hosts == 1:
        return "one host"
    if axes_of(mesh):
        return "several hosts with tp, cp or pp"
    return "several hosts with data parallelism only"


def speed_range(setup: Setup, calibration: Calibration, hosts: int) -> SpeedRange:
    """The range of the published runs of a plan's group."""
    if calibration.certainty == "guessed":
        alike = "no run like this is published"
        if setup.lora is not None and calibration.adapters:
            alike = _adapters(calibration)
        return SpeedRange(*GUESSED, f"{alike}, and the constants of the device are guesses")
    if calibration.certainty == "calibrated" and not calibration.comparable:
        low, high = CALIBRATED
        return SpeedRange(
            low, high, "no run like this is published; `ndctl calibrate` measured the device"
        )
    if setup.shape.num_experts:
        return SpeedRange(*GUESSED, "no run of a model with experts is published")
    widening = calibration.widening
    if setup.lora is not None:
        # Less is known than of the same plan without adapters.
        runs = sum(one.runs for one in calibration.ranges)
        basis = f"{_adapters(calibration)}; range of all {runs} published runs without adapters"
        lows, highs = zip(*(one.limits(widening) for one in calibration.ranges), strict=True)
        return SpeedRange(min(lows), max(highs), basis)
    group = group_of(setup.mesh, hosts)
    found = next(one for one in calibration.ranges if one.group == group)
    basis = f"range of {found.runs} published runs on {group}"
    if widening >= WIDE:
        basis += f", {widening:.1f} times as wide because few are on this device"
    low, high = found.limits(widening)
    return SpeedRange(low, high, f"{_alike(setup, calibration, group)}; {basis}")


def _adapters(calibration: Calibration) -> str:
    if not calibration.adapters:
        return "no run with adapters is published on this kind of device"
    return f"{calibration.adapters} runs with adapters are published, all of Llama 2 70B"


def _alike(setup: Setup, calibration: Calibration, group: Group) -> str:
    axes, tokens = axes_of(setup.mesh), length_of(setup.tokens)
    wanted = (group, axes, tokens)
    runs = sum(
        one.runs for one in calibration.comparable if (one.group, one.axes, one.tokens) == wanted
    )
    if not runs:
        return "no run like this is published"
    last = tokens == LENGTHS[-1]
    length = f"over {LENGTHS[-2]:,} tokens" if last else f"up to {tokens:,} tokens"
    what = f"{calibration.architecture}, {axes or 'data parallelism only'}, {length}"
    return f"{runs} comparable published run{'s' * (runs > 1)} ({what})"

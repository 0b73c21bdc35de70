"""Plans of a job, and what the planner says to one that did not fit."""

from dataclasses import dataclass

from orchestrator.contract.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A plan and the number under which the run directory has it."""

    plan: Plan
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What the planner says to a plan that did not fit into memory."""

    found: JobPlan | None
    """One that takes less and trains the same; None where there is none, or none was asked for."""
    why: str
    """What it does otherwise, or why there is none."""
    ways: tuple[str, ...] = ()
    """What a person could change, the cheapest first."""
    edits: tuple[str, ...] = ()
    """The same without its price: what is typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    to: int
    """Step of the checkpoint; 0 for the beginning."""
    since: int
    """The first bad step after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The present plan does not fit into the devices' memory."""

    device_bytes: int
    """What is believed of a device from now on."""
    adopt: bool
    """Go on with a plan that fits into so much; or else end with the ways out."""
    words: str
    """What the job ends with, unless it goes on."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Plans that take the place of the submitted one, and what the planner was asked."""

    refitted: JobPlan | None = None
    """In place of the job's own plan, which did not fit into memory."""
    replanned: JobPlan | None = None
    """For fewer hosts than were asked for."""
    larger: tuple[JobPlan, ...] = ()
    """The plans for more hosts that were given up for `replanned`, the largest first."""
    grown_at: float | None = None
    """When the job was last stopped to go back to one of them."""
    asked_at: float = 0.0
    """When agents were last asked for on hosts that are missing for them."""
    shortage: Shortage | None = None
    """A plan for less memory is being looked for."""
    device_bytes: int | None = None
    """What is believed of a device since a plan did not fit."""
    refits: int = 0
    """How often a plan for less memory was taken."""
    replanning: int | None = None
    """For how many hosts a plan is being looked for."""
    refused: int | None = None
    """The fewest hosts for which there is none, since the number of hosts last changed."""

"""The plans of a job, and the planner's answer to a plan that did not fit into memory."""

from msgspec import Struct

from orchestrator.contract.plan import Plan


class JobPlan(Struct, frozen=True, kw_only=True):
    """A plan and the number under which the run directory has it."""

    plan: Plan
    number: int


class Refit(Struct, frozen=True, kw_only=True):
    """The planner's answer to a plan that did not fit into memory."""

    found: JobPlan | None
    """A plan that needs less memory and trains alike; None if there is none, or none was asked for.
    """
    why: str
    """How it differs, or why there is none."""
    ways: tuple[str, ...] = ()
    """What a person could change, the cheapest first."""
    edits: tuple[str, ...] = ()
    """Each of `ways` as an option of `ndctl submit`, without its price."""


class Rollback(Struct, frozen=True, kw_only=True):
    to: int
    """Step of the checkpoint; 0 for the beginning."""
    since: int
    """The first bad step after it."""


class Shortage(Struct, frozen=True, kw_only=True):
    """The present plan does not fit into the devices' memory."""

    device_bytes: int
    """The device memory that the planner assumes from now on."""
    adopt: bool
    """Use a plan that fits into this memory; False: end the job and list the ways out."""
    words: str
    """The reason if the job ends."""


class Plans(Struct, frozen=True, kw_only=True):
    """Plans that replace the submitted one, and open questions to the planner."""

    refitted: JobPlan | None = None
    """Replaces the submitted plan, which did not fit into memory."""
    replanned: JobPlan | None = None
    """The plan for fewer hosts than the spec asks for."""
    larger: tuple[JobPlan, ...] = ()
    """Plans for more hosts that `replanned` replaced, the largest first."""
    grown_at: float | None = None
    """When the job was last stopped to go back to one of them."""
    asked_at: float = 0.0
    """When agents were last asked for on hosts that these plans need."""
    shortage: Shortage | None = None
    """The planner is looking for a plan that needs less memory."""
    device_bytes: int | None = None
    """The device memory that the planner assumes since a plan did not fit."""
    refits: int = 0
    """How many plans for less memory were used."""
    replanning: int | None = None
    """The number of hosts for which the planner is looking for a plan."""
    refused: int | None = None
    """The smallest number of hosts without a plan, since the number of hosts last changed."""

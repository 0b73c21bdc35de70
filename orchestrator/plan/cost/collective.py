"""The traffic of one collective in a step."""

from typing import NamedTuple

from orchestrator.plan.cost.groups import Group


class Flow(NamedTuple):
    """All calls of one collective in a step, on the rank that sends most."""

    axis: str
    collective: str
    what: str
    sent: float
    """Bytes."""
    calls: float
    group: Group
    seconds: float
    exposed: float
    """Part of `seconds` that does not overlap with computation."""

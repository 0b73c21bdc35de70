"""One collective of a step."""

from typing import NamedTuple

from orchestrator.plan.cost.groups import Group


class Flow(NamedTuple):
    """All calls of it in a step, on the rank that sends the most of it."""

    axis: str
    collective: str
    what: str
    sent: float
    """Bytes."""
    calls: float
    group: Group
    seconds: float
    exposed: float
    """Of these, what no computation hides."""

"""What went wrong so far, and how much of each budget is spent."""

from dataclasses import dataclass

from orchestrator.job.incident import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    last_at: float = 0.0
    """Time of the last event that changed anything."""
    incidents: tuple[Incident, ...] = ()
    advanced: int = 0
    """Number of incidents before the last new checkpoint: the job got past them."""
    forgiven: int = 0
    """Number of incidents before a person last submitted the job: they may be fixed."""
    restarts: int = 0
    fruitless: int = 0
    """Restarts since the last new checkpoint: what the budget counts."""
    allocations: int = 0
    """That began, the present one among them, since there was a new checkpoint or a person last
    submitted; with successors leaders, since there was an attempt."""
    allocations_since: float = 0.0
    """When the first of them began."""

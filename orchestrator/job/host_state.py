"""What a job knows of one host."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    name: str
    address: str
    devices: int
    pid: int
    incarnation: str
    """Tells one agent process of the host from the next."""
    alive: bool = True
    back: bool = False
    """Its agent was given up and came back, perhaps with ranks: it counts once none is left."""
    runs: int = 0
    """The attempt that these are of."""
    lost_at: float = 0.0
    """When its agent was last lost."""
    unfit: str = ""
    """What is wrong with the host, of what its agent found on it."""
    checked: bool = False
    """It was tried together with others, and found in order."""
    going: str = ""
    """Why its agent is about to end, where the scheduler has said so."""
    sent_away: bool = False
    """Another host was asked for in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """How often a host was sent away, for another to come."""

    times: int
    last_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A host that the job decided to do without."""

    at: float
    why: str

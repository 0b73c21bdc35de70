"""What a job knows of its hosts, and of the scheduler that granted them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.contract.launch import Allocation


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of this launch, and those that are not to be used."""

    by_name: Mapping[str, HostState] = field(default_factory=dict)
    """Every host whose agent ever registered in this launch."""
    settle_until: float = 0.0
    """Until then a new leader waits for spares as well, to choose among all hosts."""
    checks: int = 0
    """How often hosts were checked together."""
    always: tuple[str, ...] = ()
    """Hosts that no incident excludes: they are pinned."""
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Hosts that are not to be used -> why."""
    shut: tuple[str, ...] = ()
    """Those of them that nothing speaks against but the scheduler, which may open them again."""
    draining: Mapping[str, str] = field(default_factory=dict)
    """Hosts of which the scheduler says that nothing else is to begin there, and that the job keeps
    until it ends -> its words."""
    carried: tuple[str, ...] = ()
    """Those of them that were left out in the run before and that nothing else speaks against: the
    next run may have them again. Else a job of weeks would run out of hosts."""
    replaced: Mapping[str, Replaced] = field(default_factory=dict)
    """Those of them that this job decided to do without: no later leader uses them either, unless a
    person has cleared or pinned them since."""
    cleared: Mapping[str, float] = field(default_factory=dict)
    """Hosts that a person said are in order again -> when: what was before does not count."""
    away: Mapping[str, Away] = field(default_factory=dict)
    """Those that were sent away, for others to come, since the newest attempt began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """What the job has of its scheduler, and what it asked the scheduler for."""

    leader: str = ""
    """Host of the present leader, or the last one."""
    allocation: Allocation | None = None
    """What the scheduler granted; None without one."""
    left_out: tuple[str, ...] = ()
    """Hosts that the scheduler was asked to do without, and was not told since that it need not."""
    given_back: int = 0
    """How often all hosts were given back for want of some, since the newest attempt began."""
    short_since: float = 0.0
    """When hosts were first waited for that had not come when all were given back."""

"""What a job knows about its hosts, and about the scheduler that granted them."""

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.events import HostWarned


class HostState(Struct, frozen=True, kw_only=True):
    name: str
    address: str
    devices: int
    pid: int
    incarnation: str
    """Tells one agent process of the host from the next."""
    alive: bool = True
    back: bool = False
    """Its agent was given up and came back, perhaps with old ranks. It counts as alive when these
    ranks are gone."""
    runs: int = 0
    """The attempt of these ranks."""
    boot: str = ""
    """The kernel's id of its last boot; empty if that is not known."""
    lost_at: float = 0.0
    """When its agent was last lost."""
    closed: bool = False
    """At that time the host closed the agent's connection."""
    works: str = ""
    """What shows that only its agent was lost at that time; empty: nothing does."""
    unfit: str = ""
    """Why the host failed a check of its agent; empty if it did not."""
    checked: bool = False
    """It passed the check of all hosts together."""
    going: str = ""
    """Why its agent is about to end, if the scheduler has said so."""
    sent_away: bool = False
    """The scheduler was asked for another host in its place."""


def lost_host(host: HostState, at: float, *, closed: bool) -> HostState:
    """The host without its agent. `closed`: it closed the agent's connection."""
    return replace(host, alive=False, back=False, lost_at=at, closed=closed, works="")


class Away(Struct, frozen=True, kw_only=True):
    """How often the scheduler was asked to replace a host."""

    times: int
    last_at: float


class Replaced(Struct, frozen=True, kw_only=True):
    """A host that the job replaced for good."""

    at: float
    why: str


class Hosts(Struct, frozen=True, kw_only=True):
    """The hosts of this launch, and the excluded ones."""

    by_name: Mapping[str, HostState] = field(default_factory=dict)
    """Every host whose agent ever registered in this launch."""
    settle_until: float = 0.0
    """Until this time a new leader waits for spares too, to choose among all hosts."""
    checks: int = 0
    """How often hosts were checked together."""
    always: tuple[str, ...] = ()
    """Pinned hosts: no incident excludes them."""
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Excluded hosts -> why."""
    shut: tuple[str, ...] = ()
    """Excluded hosts that the scheduler has drained or cordoned, and may open again. There is no
    other reason against them."""
    draining: Mapping[str, str] = field(default_factory=dict)
    """Hosts that the scheduler drains and that the job keeps until it ends -> the scheduler's
    reason."""
    warned: tuple[HostWarned, ...] = ()
    """What hosts warn of at present, oldest first. At most one of a kind for each host."""
    warned_before: tuple[HostWarned, ...] = ()
    """What hosts warned of in earlier launches, at most one of a kind for each host. New agents
    take minutes to notice it again; agents that stayed repeat it at once."""
    save_asked_at: float = 0.0
    """When the ranks were last told to save a checkpoint because a host warns; 0: never."""
    carried: tuple[str, ...] = ()
    """Excluded hosts that were only excluded from the allocation before. The next allocation may
    have them again; otherwise a job of weeks would run out of hosts."""
    replaced: Mapping[str, Replaced] = field(default_factory=dict)
    """Excluded hosts that this job replaced for good. Later leaders exclude them too, unless a
    person has cleared or pinned them since."""
    cleared: Mapping[str, float] = field(default_factory=dict)
    """Hosts that a person has cleared -> when. Failures before that do not count."""
    away: Mapping[str, Away] = field(default_factory=dict)
    """Hosts that were replaced since the newest attempt began."""


class SchedulerState(Struct, frozen=True, kw_only=True):
    """What the scheduler granted, and what the job asked it for."""

    leader: str = ""
    """The host of the present leader, or of the last one."""
    allocation: Allocation | None = None
    """What the scheduler granted; None without a scheduler."""
    left_out: tuple[str, ...] = ()
    """Hosts that the scheduler was asked to exclude, and was not asked to include since."""
    given_back: int = 0
    """How often all hosts were given back because some were missing, since the newest attempt
    began."""
    short_since: float = 0.0
    """When the job began to wait for the hosts that were missing when all were given back."""

"""Where the world comes in: Protocols that `system.py` and backends implement, and tests play."""

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

from orchestrator.contract.check_results import Finding
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError

P = ParamSpec("P")
T = TypeVar("T")


class Worker(Protocol):
    """Runs calls that block, so that the event loop of a leader or an agent goes on meanwhile.

    Leader, agent and failover hand it each call that reads storage or asks a scheduler.
    `asyncio.to_thread` is the real one; the simulation lets the call take virtual time.
    """

    def __call__(
        self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...


class Clock(Protocol):
    def now(self) -> float:
        """Unix seconds; may jump."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Completed:
    code: int
    out: str
    err: str


class Shell(Protocol):
    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        """Run a command to its end. Raises TimeoutError; a missing program is code 127."""


@dataclass(frozen=True, slots=True)
class HostNotice:
    """What the scheduler holds against a host of the allocation."""

    host: str
    state: str
    """In the scheduler's words, as `DRAINING`."""
    reason: str
    lets_finish: bool = False
    """What runs there may run to its end: only nothing else is to begin."""


RunPhase = Literal["running", "ending", "broken", "queued again", "over"]
"""`ending`: its processes are being ended, and that was asked for; `broken`: nobody asked for it,
and the job can be queued again still; `queued again`: it waits for its next run, or has begun it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """What the scheduler says of the run of a job to which the asking host was given."""

    phase: RunPhase
    words: str
    """The same in the scheduler's words, as `Slurm job 12 is PENDING`."""
    hosts: tuple[str, ...] = ()
    """As they were given."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """Of the hosts that were asked about, those that the scheduler has taken out of the run, or
    takes for dead -> its words."""
    ends_at: float | None = None
    """Unix seconds of the time limit."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """How a launch stands with its scheduler."""

    words: str | None
    """None: nothing is known of it, and it may be being submitted at this moment."""
    held: bool
    """The scheduler still has it, or does not answer."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Of a launch that waits: hosts that it does without for other reasons than its spec's, each
    with the command that lets it have the host."""
    unknown: str = ""
    """Why the scheduler cannot say how it stands; empty where it says."""
    fix: str = ""
    """What to type about that."""
    over: Ending | None = None
    """How it ended, as the scheduler has it: what was deleted there is CANCELLED. None: it has not,
    or the scheduler does not tell one ending from another."""
    leaving: bool = False
    """It is over, and hosts of it may still write a last checkpoint."""
    running: bool = False
    """Its hosts run, also where none of them can be asked."""
    resume: str = ""
    """What lets a job go on that the scheduler has stopped for a while; empty where it has not."""
    at: float | None = None
    """Since when it is so; of what is unknown, when a leader was last heard. None: not known."""


class Backend(Protocol):
    """How a launch becomes agents on hosts.

    Every method raises BackendError when the scheduler does not answer or refuses.
    """

    def describe(self, handover: Handover) -> str:
        """Exactly what `submit` would start, for a person to read; nobody is asked."""

    def check(self, handover: Handover) -> tuple[Finding, ...]:
        """What the scheduler says to it before anything is queued; nothing without one.

        The BackendError names everything that stands in the way.
        """

    def submit(self, handover: Handover) -> None:
        """Start one agent on each host, having made sure that none of an earlier launch is left."""

    def standing(self, launch: LaunchPlan) -> str | None:
        """What the scheduler still has of it, in words; None when it has nothing any more."""

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[Sighting]:
        """How each stands, for somebody who waits for it: within seconds, and never raises."""

    def name_of(self, launch: LaunchPlan) -> str | None:
        """What the scheduler calls it, as recorded: nobody is asked."""

    def cluster(self) -> str:
        """Which cluster it is: strikes against hosts are kept for each."""

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Those of `hosts` that it has; of another's name a scheduler may refuse the whole job."""

    def rival(self, launch: LaunchPlan) -> str | None:
        """What else than these hosts the scheduler has for this very launch, in words: then they
        are none of the job's. None: nothing. Asked by each agent before it begins."""

    def allocation(self, launch: LaunchPlan) -> Allocation | None:
        """What the leader was given; None where the hosts are those of `launch`.

        Raises CannotLead where the scheduler cannot be asked from the leader's place.
        """

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        """Hosts that the scheduler wants back or has given up."""

    def unbegun(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        """Of hosts that no agent has come from, those where none can begin, as for want of an
        interpreter -> why, in the scheduler's own words; by the leader."""

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> OwnRun:
        """How the run of the asking host stands, and which of `hosts` are none of it any more.

        Asked once, without patience: whoever asks knows what to do while there is no answer.
        """

    def why_ending(self, launch: LaunchPlan) -> Cause:
        """Why the leader was signalled."""

    def taken(self, launch: LaunchPlan, hosts: Mapping[str, float]) -> Mapping[str, str]:
        """Of hosts, and for how many seconds their agents have been silent, those that the
        scheduler itself ended without a warning -> why; asked where hosts have successors."""

    def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        """Start the agent of one host again, there or on another host; called by the leader.

        `elsewhere`, not there again, is asked where an allocation has successors alone; of a host
        that is `shut` nobody need be kept off it, for the scheduler does that until it opens it.
        `silent_s`: since when nobody there is heard; what began since then may yet be.

        Raises MustLeave where the agent has to leave by itself, for another one to come.
        """

    def clear_host(self, launch: LaunchPlan, host: str) -> str:
        """End all that an agent left on another host of the run, the agent too; what was found
        there, in words. When it returns no process of the job is left there.

        Asked where an allocation has no successors, by an agent that takes over from the one of
        that host. The BackendError says why that is not known.
        """

    def revive_leader(self, launch: LaunchPlan, *, silent_s: float | None) -> None:
        """Another agent in the place of the one that is to lead, elsewhere where that never began;
        asked by the others, of an allocation that has successors.

        `silent_s`: since when it is not heard; None: it has yet to begin, and may only be slow.
        """

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        """Give the hosts back and queue for others, without those to `exclude`; by the leader.

        `again`: hosts that this job asked to leave out before, and that may be used again; said
        where an allocation has no successors. Not `whole`: the leader's own host alone, asked
        where it has.
        """

    def release(self, launch: LaunchPlan) -> None:
        """Give back the hosts of a run whose job has ended, where the scheduler would not do so by
        itself once all agents have left; by the leader, at its end."""

    def clear(self, launch: LaunchPlan) -> None:
        """End every process of the job; returns when none is left."""


@dataclass(frozen=True, slots=True)
class Former:
    """What a cluster has of a job of some name."""

    launch: int
    """Number of the submission that it is of."""
    over: bool
    """Nothing of it runs, nor will."""
    words: str
    copy: RunDir | None = None
    """What is known here of that submission's run directory, as it was last seen."""


class Copy(Protocol):
    """A job whose run directory is elsewhere: what is known of it here, to be read as one."""

    run_dir: RunDir
    stale: BackendError | None
    """Why the last `refresh` failed; None where it did not."""
    stopping: bool
    """Ranks were told to stop: what comes next may be the last."""

    @property
    def has_begun(self) -> bool:
        """What is known comes from the leader, and is no guess of whoever submitted."""

    @property
    def led_at(self) -> float | None:
        """When a leader was last known to live; None where none has been heard from here."""

    @property
    def cluster(self) -> str:
        """Where it is asked for: copies of one cluster are answered alike where it is away."""

    def here(self, launch: LaunchPlan) -> LaunchPlan:
        """The launch as this machine has to ask the backend for it."""

    def refresh(self) -> None:
        """Bring it up to date. Raises BackendError where that cannot be."""

    def remember(self, ending: Ending, why: str) -> None:
        """The scheduler says that it is over, of which the journal here does not know."""

    def fetch_logs(self, hosts: Collection[str] = (), *, follow: bool = False) -> Sequence[str]:
        """Bring the ranks' logs, of some hosts or of all, and say which could not be had; `follow`:
        they go on to come as they are written."""

    def cancel(self) -> Completed | None:
        """Have its leader end the job; None where nothing of it runs that could be asked."""

    def let_go(self) -> None:
        """No leader of it lives any more: what is known here is for this machine to write."""


class PendingCopy(Copy, Protocol):
    """Of a launch that is being handed over; one of the two says what became of that."""

    def keep(self) -> None:
        """The cluster has the launch."""

    def forget(self) -> None:
        """The cluster has nothing of the launch: what is known here is as it was before."""


@runtime_checkable
class RemoteBackend(Backend, Protocol):
    """One whose jobs write their run directories themselves, where whoever submits may not see
    them: of what `submit` hands over."""

    def former(self, launch: LaunchPlan, run_root: Path) -> Former | None:
        """What there is of the name already, in the cluster, or as it was last seen from here."""

    def copy(self, handover: Handover, run_root: Path) -> PendingCopy:
        """Where this machine keeps what it knows of the job, which is about to be submitted, at
        `handover.job.at`: made before that, for whatever happens meanwhile."""

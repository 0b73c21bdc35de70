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


class Scheduler(Protocol):
    """What a terminal asks about launches that exist.

    Every method raises BackendError when the scheduler refuses or is unreachable.
    """

    def standing(self, launch: LaunchPlan) -> str | None:
        """The state of the launch in words; None when the scheduler has nothing of it."""

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[Sighting]:
        """The state of each launch for a person who waits: within seconds; never raises."""

    def name_of(self, launch: LaunchPlan) -> str | None:
        """The name that the scheduler gave the launch, from local records only."""

    def cluster(self) -> str:
        """The name of the cluster. Strikes against hosts are kept per cluster."""

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """The `hosts` that may be named to the scheduler. Slurm refuses a whole job for one
        unknown name."""

    def clear(self, launch: LaunchPlan) -> None:
        """End every process of the job; return when none is left."""


class SubmittingScheduler(Scheduler, Protocol):
    """A scheduler that can also start a launch."""

    def describe(self, handover: Handover) -> str:
        """Exactly what `submit` would start, for a person to read. Asks no scheduler."""

    def check(self, handover: Handover) -> tuple[Finding, ...]:
        """What the scheduler reports before anything is queued.

        The BackendError lists everything that prevents the launch.
        """

    def submit(self, handover: Handover) -> None:
        """Start one agent on each host, after no process of an earlier launch is left."""


class AllocationBackend(Protocol):
    """What the agents and the leader of a job ask about the hosts that they run on.

    Each property is a narrower interface, or None where the backend has no such thing. A backend
    returns itself where it implements the interface.
    Every method raises BackendError when the scheduler refuses or is unreachable.
    """

    @property
    def granted(self) -> "GrantingScheduler | None":
        """The scheduler that granted the hosts; None for processes of one machine."""

    @property
    def fixed_hosts(self) -> "FixedHosts | None":
        """Set where the job keeps its hosts until the run ends (Slurm)."""

    @property
    def successors(self) -> "SuccessorHosts | None":
        """Set where the cluster starts another agent in place of a lost one (Kubernetes)."""

    @property
    def unattended(self) -> "UnattendedAllocation | None":
        """Set where the hosts may stay allocated after all agents have left (a Slurm batch job)."""

    def cluster(self) -> str:
        """The name of the cluster. Strikes against hosts are kept per cluster."""

    def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        """Start the agent of one host again, there or on another host. The leader calls it.

        `elsewhere`: on another host; only where the backend has `successors`. `shut`: the
        scheduler itself starts nothing on this host, so no exclusion is needed. `silent_s`: age of
        the last heartbeat from this host; a process that started since then is left alone.

        Raises MustLeave where the backend may not end the agent, so the agent has to exit itself.
        """


class GrantingScheduler(Protocol):
    """The scheduler that granted the hosts of a run."""

    def allocation(self, launch: LaunchPlan) -> Allocation:
        """What the leader was granted. Raises CannotLead where the scheduler cannot be asked from
        the leader's host."""

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        """The `hosts` that the scheduler drains or has given up."""

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> OwnRun:
        """The state of the caller's run, and which of `hosts` no longer belong to it.

        One attempt without retries: the caller knows what to do without an answer.
        """

    def why_ending(self, launch: LaunchPlan) -> Cause:
        """Why the leader received a signal."""

    def standing(self, launch: LaunchPlan) -> str | None:
        """The state of the launch in words; None when the scheduler has nothing of it."""

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        """Release the hosts and queue for others, without the hosts in `exclude`.

        `again`: hosts that this job excluded before and that the scheduler may grant again; only
        where the backend has `fixed_hosts`. `whole=False`: requeue the leader's own host alone;
        only where the backend has `successors`.
        """


class FixedHosts(Protocol):
    """An allocation whose hosts stay the same until the run ends."""

    def rival(self, launch: LaunchPlan) -> str | None:
        """Another allocation of this same launch, in words; None: there is none. Each agent asks
        before it starts, because hosts of the wrong allocation must not touch the job."""

    def unbegun(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        """Hosts where no agent can start (for example: no Python interpreter) -> reason."""

    def clear_host(self, launch: LaunchPlan, host: str) -> str:
        """End every process of the job on another host; return what was found there, in words.

        An agent calls it before it takes over from the leader on that host. A BackendError means
        that it is not known whether processes are left.
        """


class SuccessorHosts(Protocol):
    """A cluster that starts another agent in place of a lost one."""

    def taken(self, launch: LaunchPlan, hosts: Mapping[str, float]) -> Mapping[str, str]:
        """`hosts`: host -> seconds since its last heartbeat. Returns the hosts whose agents the
        cluster ended without a warning -> reason."""

    def revive_leader(self, launch: LaunchPlan, *, silent_s: float | None) -> None:
        """Request another agent in place of the leader, on another host if it never started. The
        other agents call it.

        `silent_s`: age of the leader's last heartbeat; None: it has not started yet and may only
        be slow.
        """


class UnattendedAllocation(Protocol):
    """An allocation that can outlive the process that should end it."""

    def release(self, launch: LaunchPlan) -> None:
        """Release the hosts of a run whose job has ended. The leader calls it last."""


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
class RemoteScheduler(SubmittingScheduler, Protocol):
    """One whose jobs write their run directories themselves, where whoever submits may not see
    them: of what `submit` hands over."""

    def former(self, launch: LaunchPlan, run_root: Path) -> Former | None:
        """What there is of the name already, in the cluster, or as it was last seen from here."""

    def copy(self, handover: Handover, run_root: Path) -> PendingCopy:
        """Where this machine keeps what it knows of the job, which is about to be submitted, at
        `handover.job.at`: made before that, for whatever happens meanwhile."""

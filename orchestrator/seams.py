"""Protocols through which ndctl uses the outside world. `system.py` and the backends implement
them; tests and the simulation replace them."""

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

from msgspec import Struct, field

from orchestrator.contract.check_results import Finding
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError

P = ParamSpec("P")
T = TypeVar("T")


class Worker(Protocol):
    """Runs blocking calls, so that the event loop of a leader or an agent continues meanwhile.

    Leader, agent and failover pass it every call that reads storage or asks a scheduler.
    `asyncio.to_thread` is the real one. In the simulation a call takes virtual time.
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


class Completed(Struct, frozen=True):
    code: int
    out: str
    err: str


class Shell(Protocol):
    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        """Run a command to its end. Raises TimeoutError; if the program is missing, code is 127."""


class HostNotice(Struct, frozen=True):
    """The scheduler flagged a host of the allocation."""

    host: str
    state: str
    """In the scheduler's words, such as `DRAINING`."""
    reason: str
    lets_finish: bool = False
    """Running work may finish; only new work must not start."""
    down: bool = False
    """The host has failed, in the scheduler's view."""


RunPhase = Literal["running", "ending", "broken", "queued again", "over"]
"""`ending`: its processes are being stopped on request; `broken`: it ended without a request, and
the job can still be requeued; `queued again`: it waits for its next run, or that has started."""


class CurrentRun(Struct, frozen=True, kw_only=True):
    """What the scheduler says about the run of the job to which the asking host belongs."""

    phase: RunPhase
    words: str
    """The state in the scheduler's words, such as `Slurm job 12 is PENDING`."""
    hosts: tuple[str, ...] = ()
    """The hosts as they were granted."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """The hosts in question that the scheduler has removed from the run or considers dead -> its
    words."""
    ends_at: float | None = None
    """Time limit in Unix seconds."""


class LaunchStatus(Struct, frozen=True):
    """Status of a launch in its scheduler."""

    words: str | None
    """The state in words; None: nothing is known, perhaps because it is just being submitted."""
    held: bool
    """The scheduler still has it, or is unreachable."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """For a queued launch: hosts that it excludes for reasons other than its spec, each with the
    command that allows the host again."""
    needs: str = ""
    """What a person must do before a queued launch can start; empty: it only waits."""
    unknown: str = ""
    """Why the scheduler does not know the state; empty if it does."""
    fix: str = ""
    """Command that helps with `unknown`."""
    over: Ending | None = None
    """How it ended according to the scheduler; a job deleted there is CANCELLED. None: it has not
    ended, or the scheduler does not distinguish endings."""
    leaving: bool = False
    """It is over, but some of its hosts may still write a last checkpoint."""
    running: bool = False
    """Its hosts run, even if none of them can be asked."""
    resume: str = ""
    """Command that continues a job that was suspended in the scheduler; empty if it was not."""
    at: float | None = None
    """Unix seconds since when it has this state; if the state is unknown, when the leader was last
    heard. None: unknown."""


class Scheduler(Protocol):
    """What commands of a user ask about existing launches.

    Every method raises BackendError if the scheduler refuses or is unreachable.
    """

    def standing(self, launch: LaunchPlan) -> str | None:
        """State of the launch in words; None if the scheduler does not know the launch."""

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[LaunchStatus]:
        """State of each launch for a waiting user: takes seconds at most, and never raises."""

    def name_of(self, launch: LaunchPlan) -> str | None:
        """The scheduler's name of the launch, from local records only."""

    def cluster(self) -> str:
        """Name of the cluster. Strikes against hosts are kept per cluster."""

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """The `hosts` that the scheduler knows. Slurm refuses a whole job for one unknown name."""

    def clear(self, launch: LaunchPlan) -> None:
        """End every process of the job. Returns when none is left."""


class SubmittingScheduler(Scheduler, Protocol):
    """A scheduler that can also start a launch."""

    def describe(self, handover: Handover) -> str:
        """Exactly what `submit` would start, for a user to read. Asks no scheduler."""

    def check(self, handover: Handover) -> tuple[Finding, ...]:
        """What the scheduler reports before anything is queued.

        The BackendError lists everything that prevents the launch.
        """

    def submit(self, handover: Handover) -> None:
        """Start one agent on each host, after all processes of earlier launches have ended."""


class AllocationBackend(Protocol):
    """What the agents and the leader of a job ask about the hosts that they run on.

    Each property is a narrower interface, or None if the backend does not have it. A backend
    returns itself if it implements the interface.
    Every method raises BackendError if the scheduler refuses or is unreachable.
    """

    @property
    def granted(self) -> "GrantingScheduler | None":
        """The scheduler that granted the hosts; None for processes of one machine."""

    @property
    def fixed_hosts(self) -> "FixedHosts | None":
        """Set if the job keeps its hosts until the run ends (Slurm, one machine)."""

    @property
    def successors(self) -> "SuccessorHosts | None":
        """Set if the cluster starts another agent in place of a lost one (Kubernetes)."""

    @property
    def unattended(self) -> "UnattendedAllocation | None":
        """Set if the hosts may stay allocated after all agents have exited (a Slurm batch job)."""

    def cluster(self) -> str:
        """Name of the cluster. Strikes against hosts are kept per cluster."""

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

        Raises MustLeave if the backend may not end the agent, so that the agent must exit itself.
        """


class GrantingScheduler(Protocol):
    """The scheduler that granted the hosts of a run."""

    def allocation(self, launch: LaunchPlan) -> Allocation:
        """What was granted. Raises CannotLead if the scheduler cannot be asked from the leader's
        host."""

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        """The `hosts` that the scheduler drains or has given up."""

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> CurrentRun:
        """The state of the caller's run, and which of `hosts` no longer belong to it.

        One attempt without retries: the caller knows what to do without an answer.
        """

    def why_ending(self, launch: LaunchPlan) -> Cause:
        """Why the leader received a signal."""

    def standing(self, launch: LaunchPlan) -> str | None:
        """State of the launch in words; None if the scheduler does not know the launch."""

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
    """Hosts that stay the same until the run ends."""

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


class ExistingJob(Struct, frozen=True):
    """A job of some name that a cluster has already."""

    launch: int
    """Number of its submission."""
    over: bool
    """No process of it runs, or will start."""
    words: str
    copy: RunDir | None = None
    """Local copy of that submission's run directory, as last seen."""


class JobCopy(Protocol):
    """Local copy of a job whose run directory is elsewhere. Commands read it like a run
    directory."""

    run_dir: RunDir
    stale: BackendError | None
    """Why the last `refresh` failed; None if it succeeded."""
    stopping: bool
    """Ranks were told to stop, so the next refresh may be the last one with news."""

    @property
    def has_begun(self) -> bool:
        """The copy comes from the leader, and not from the machine that submitted the job."""

    @property
    def led_at(self) -> float | None:
        """When the leader was last known to live; None if no leader was heard here."""

    @property
    def cluster(self) -> str:
        """Name of the cluster to ask. If a cluster is unreachable, so are all copies from it."""

    def here(self, launch: LaunchPlan) -> LaunchPlan:
        """The launch with which this machine must ask the backend."""

    def refresh(self) -> None:
        """Update the copy. Raises BackendError if that fails."""

    def remember(self, ending: Ending, why: str) -> None:
        """Record that the scheduler reports the job as ended, which the journal here lacks."""

    def deletion(self) -> str:
        """Says that the job is being deleted while its processes run, and what delays it; empty if
        it is not, or if that is unknown."""

    def fetch_logs(self, hosts: Collection[str] = (), *, follow: bool = False) -> Sequence[str]:
        """Fetch logs of ranks, of some hosts or of all, and return which could not be fetched.
        `follow`: keep fetching new lines."""

    def cancel(self, by: str) -> Completed | None:
        """Ask the leader to end the job for the person `by`; None if none of its processes can be
        asked."""

    def snapshot(self) -> Completed | None:
        """The JSON of `ndctl snapshot`, run in the job's cluster; None if none of the job's
        processes can be asked."""

    def profile(self, ranks: Sequence[int], steps: int, wait_s: float) -> Completed | None:
        """The JSON of `ndctl profile`, as `snapshot`."""

    def exec_on(
        self,
        host: str,
        argv: Sequence[str],
        out: Callable[[bytes], object],
        err: Callable[[bytes], object],
        given: int | None,
    ) -> int:
        """Run a command beside the ranks of a host until it ends, pass its output on, and return
        its exit code.

        Args:
            given: descriptor of its standard input; None: it has none.

        Raises:
            JobError: the job does not run on this host.
            BackendError: the cluster refuses, or is unreachable.
        """

    def let_go(self) -> None:
        """Allow this machine to write the copy, because no leader of the job lives any more."""


class PendingJobCopy(JobCopy, Protocol):
    """Copy of a job that is being submitted. The caller then calls one of these two methods."""

    def keep(self) -> None:
        """The cluster has the launch."""

    def forget(self) -> None:
        """The cluster does not have the launch: restore the copy as it was before."""


@runtime_checkable
class RemoteScheduler(SubmittingScheduler, Protocol):
    """A scheduler whose jobs write their run directories themselves, from what `submit` hands over.
    The submitting machine may not see these directories."""

    def former(self, launch: LaunchPlan, run_root: Path) -> ExistingJob | None:
        """The job of this name that the cluster has already, or had when last seen from here."""

    def copy(self, handover: Handover, run_root: Path) -> PendingJobCopy:
        """Create the copy of a job before it is submitted at `handover.job.at`, so that it exists
        whatever happens during the submission."""

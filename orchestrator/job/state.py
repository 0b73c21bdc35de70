"""The state of a job: a frozen value, the fold of its journal."""

from collections.abc import Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.checkpoint_interval import Exposure, SavePace
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.plan import Plan
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.job.host_state import Hosts, HostState, SchedulerState
from orchestrator.job.incident import WARNED, History, Incident
from orchestrator.job.interruption import Interruption, Leaving
from orchestrator.job.plans import JobPlan, Plans
from orchestrator.job.progress import Attempt, Progress
from orchestrator.job.stage import (
    Checking,
    Diagnosing,
    Ended,
    Holding,
    Queued,
    Stage,
    Starting,
    State,
    Stopping,
    Submitted,
    Waiting,
)

REPLACE_S = 30.0
"""The wait for the next agent of a host after one was lost."""


class Run(Struct, frozen=True, kw_only=True):
    """One job. Its size grows with hosts, but not with ranks or steps."""

    job: JobSubmitted | None = None
    """The latest submission; None before the first."""
    stage: Stage = field(default_factory=Submitted)
    attempt: Attempt = field(default_factory=Attempt)
    progress: Progress = field(default_factory=Progress)
    hosts: Hosts = field(default_factory=Hosts)
    scheduler: SchedulerState = field(default_factory=SchedulerState)
    plans: Plans = field(default_factory=Plans)
    interruption: Interruption = field(default_factory=Interruption)
    history: History = field(default_factory=History)
    last_at: float = 0.0
    """When the leader learned of the last event that changed anything."""

    @property
    def current(self) -> JobPlan:
        """The plan of the ranks. The job must have been submitted."""
        return self.plans.replanned or self.full

    @property
    def full(self) -> JobPlan:
        """The plan for all the hosts that the spec asks for."""
        assert self.job is not None
        return self.plans.refitted or JobPlan(plan=self.job.plan, number=self.job.plan_number)

    @property
    def plan(self) -> Plan:
        return self.current.plan

    @property
    def ending(self) -> Ending | None:
        return self.stage.ending if isinstance(self.stage, Ended) else None

    @property
    def state(self) -> State:
        match self.stage:
            case Ended(ending=ending):
                return ending
            case Submitted():
                return "SUBMITTED"
            case Queued():
                return "PENDING"
            # No step tells that the program trains, or trains again, so its processes must do.
            case Starting() if self.attempt.runs:
                return "RUNNING"
            case _ if self.recovering:
                return "RECOVERING"
            case Waiting() | Holding():
                return "PENDING"
            case Starting() | Checking():
                return "STARTING"
            case _:
                return "RUNNING"

    @property
    def is_own(self) -> bool:
        """The ranks run the user's own program, which decides where it resumes."""
        return self.job is not None and self.job.run is not None

    @property
    def recovering(self) -> bool:
        """Something failed, and training has not reached a new step since."""
        if self.interruption.findings is not None:
            return True
        incidents = self.history.incidents
        return bool(incidents) and incidents[-1].recovered_after_s is None

    @property
    def copies_in_memory(self) -> int | None:
        """Copies of each checkpoint in memory on other hosts, as far as is known; None: nothing is
        kept in memory."""
        job, said = self.job, self.attempt.memory
        if job is None or not job.in_memory or self.attempt.memory_lost:
            return None
        if said is not None:
            return said.copies
        # A program of the user may keep nothing.
        return job.copies if job.run is None else None


def pace_of(run: Run) -> SavePace:
    """How often the job failed, for the checkpoint interval of the next attempt. Drills do not
    count, and neither do hosts that failed while no rank ran, or were replaced before they failed.
    """
    incidents = run.history.incidents
    broke = [
        one
        for one in incidents
        if one.drill is None and one.saved is not None and one.kind != WARNED
    ]
    exposure = Exposure(
        failures=len(broke),
        in_memory=sum(one.in_memory for one in broke),
        observed_s=run.progress.trained_s,
    )
    return SavePace(exposure=exposure, every_steps=run.progress.save_every)


def with_host(run: Run, host: HostState) -> Run:
    return replace(run, hosts=replace(run.hosts, by_name={**run.hosts.by_name, host.name: host}))


def with_findings(run: Run, findings: Findings | None) -> Run:
    return replace(run, interruption=replace(run.interruption, findings=findings))


def with_leaving(run: Run, leaving: Leaving | None) -> Run:
    return replace(run, interruption=replace(run.interruption, leaving=leaving))


def with_incident(run: Run, incident: Incident) -> Run:
    """Adds an incident of the present attempt. Its ranks may have reported a later step than the
    journal, which has few of them."""
    incidents = (*run.history.incidents, incident)
    attempt = run.attempt
    if incident.step:
        attempt = replace(attempt, step=max(attempt.own_step, incident.step), stepped=True)
    return replace(
        run,
        attempt=attempt,
        history=replace(run.history, incidents=incidents),
    )


def with_deadline(run: Run, deadline: float) -> Run:
    """Sets the deadline of the present stage, if it has one."""
    match run.stage:
        case Waiting() | Holding() | Checking() | Diagnosing() | Stopping():
            return replace(run, stage=replace(run.stage, deadline=deadline))
        case _:
            return run


def is_overdue(run: Run, at: float) -> bool:
    """The present stage has a deadline, and it has passed."""
    match run.stage:
        case Waiting() | Holding() | Checking() | Diagnosing() | Stopping():
            return at >= run.stage.deadline
        case _:
            return False


# Hosts


def switches_of(run: Run) -> Mapping[str, tuple[str, ...]]:
    """Host -> the switches above it, as the allocation says, or else as planned."""
    return run.scheduler.allocation.switches if run.scheduler.allocation else run.plan.switches


def has_successors(run: Run) -> bool:
    """The scheduler replaces lost hosts while the others wait, as Kubernetes does with pods."""
    return run.scheduler.allocation is not None and run.scheduler.allocation.successor_s is not None


class _Placed:
    """The hosts of the newest placement as a set. Each of thousands of hosts asks whether it is
    among them, and a placement is a tuple."""

    def __init__(self) -> None:
        self.known: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())

    def of(self, placement: tuple[str, ...]) -> frozenset[str]:
        known, hosts = self.known
        if known is not placement:
            hosts = frozenset(placement)
            self.known = (placement, hosts)
        return hosts


_placed = _Placed()


def is_placed(run: Run, host: str) -> bool:
    """The host is one of the present attempt, or of the last one between two attempts."""
    return host in _placed.of(run.attempt.placement)


class EndedHosts(Mapping[str, bool]):
    """Host without a process of the attempt -> whether all its ranks returned 0. Immutable, and a
    host is added in constant time: thousands end one after the other, each in a new state.

    All versions share one dictionary, to which the newest version adds. Each entry has its number,
    and a version has the entries whose numbers are below its length.
    """

    __slots__ = ("_entries", "_length")

    def __init__(self, hosts: Mapping[str, bool] | None = None) -> None:
        self._entries = {host: (n, one) for n, (host, one) in enumerate((hosts or {}).items())}
        self._length = len(self._entries)

    def __getitem__(self, host: str) -> bool:
        number, finished = self._entries[host]
        if number >= self._length:
            raise KeyError(host)
        return finished

    def __contains__(self, host: object) -> bool:
        entry = self._entries.get(host)  # type: ignore[call-overload]
        return entry is not None and entry[0] < self._length

    def __iter__(self) -> Iterator[str]:
        # The list is made in one step of the interpreter: another thread may add a host meanwhile.
        return iter(list(self._entries)[: self._length])

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return repr(dict(self))

    def adding(self, host: str, finished: bool) -> "EndedHosts":
        if host in self:
            return EndedHosts({**self, host: finished})
        if len(self._entries) > self._length:
            return EndedHosts(self).adding(host, finished)  # a newer version has added other hosts
        self._entries[host] = (self._length, finished)
        newer = object.__new__(EndedHosts)
        newer._entries, newer._length = self._entries, self._length + 1
        return newer


def with_ended(hosts: Mapping[str, bool], host: str, *, finished: bool) -> EndedHosts:
    """`hosts` as state has them: a dictionary at first, and after a snapshot was read."""
    known = hosts if isinstance(hosts, EndedHosts) else EndedHosts(hosts)
    return known.adding(host, finished)


def hosts_given(run: Run) -> tuple[str, ...]:
    """All hosts of the job, including spares and hosts whose agent has not come yet."""
    assert run.job is not None
    if run.scheduler.allocation is None:
        return run.job.launch.hosts
    if run.scheduler.allocation.successor_s is None:
        return run.scheduler.allocation.hosts
    return tuple(dict.fromkeys((*run.scheduler.allocation.hosts, *run.hosts.by_name)))


def usable(run: Run) -> list[str]:
    """Hosts that can run their part of the plan."""
    # Each of thousands of hosts asks this about all hosts as it registers: no function call inside.
    need, exclude = run.plan.ranks_per_host, run.hosts.exclude
    return [
        name
        for name, host in run.hosts.by_name.items()
        if host.alive
        and not host.going
        and host.devices >= need
        and not host.unfit
        and name not in exclude
    ]


def coming(run: Run, at: float) -> list[str]:
    """Hosts without an agent that may get one soon."""
    known, exclude = run.hosts.by_name, run.hosts.exclude
    return [  # nearly all hosts are alive or never came: no function call for these, see `usable`
        name
        for name in hosts_given(run)
        if ((host := known.get(name)) is None or (not host.alive and _may_come(host, at)))
        and name not in exclude
    ]


def _may_come(lost: HostState, at: float) -> bool:
    return not lost.unfit and (lost.back or at < lost.lost_at + REPLACE_S)

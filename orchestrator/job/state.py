"""The state of a job: a frozen value, the fold of its journal."""

from dataclasses import dataclass, field, replace

from orchestrator.contract.checkpoint_interval import Exposure, SavePace
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.plan import Plan
from orchestrator.job.findings import Findings
from orchestrator.job.history import History
from orchestrator.job.host_state import Hosts, HostState, SchedulerState
from orchestrator.job.incident import Incident
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job. Small whatever its size: what grows with ranks or steps is left to the views."""

    job: JobSubmitted | None = None
    """The launch that counts; None before the first submission."""
    stage: Stage = field(default_factory=Submitted)
    attempt: Attempt = field(default_factory=Attempt)
    progress: Progress = field(default_factory=Progress)
    hosts: Hosts = field(default_factory=Hosts)
    scheduler: SchedulerState = field(default_factory=SchedulerState)
    plans: Plans = field(default_factory=Plans)
    interruption: Interruption = field(default_factory=Interruption)
    history: History = field(default_factory=History)

    @property
    def current(self) -> JobPlan:
        """The plan that ranks run by. Only for a job that was submitted."""
        return self.plans.replanned or self.full

    @property
    def full(self) -> JobPlan:
        """The plan for as many hosts as were asked for."""
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
            case _ if self.recovering:
                return "RECOVERING"
            case Waiting() | Holding():
                return "PENDING"
            case Starting() | Checking():
                return "STARTING"
            case _:
                return "RUNNING"

    @property
    def recovering(self) -> bool:
        """Something broke, and training has not made a new step since."""
        if self.interruption.findings is not None:
            return True
        incidents = self.history.incidents
        return bool(incidents) and incidents[-1].recovered_after_s is None


def pace_of(run: Run) -> SavePace:
    """What the next attempt is to know of how often the job broke: neither what was rehearsed, nor
    what befell hosts while no rank ran on them."""
    incidents = run.history.incidents
    broke = [one for one in incidents if one.drill is None and one.saved is not None]
    exposure = Exposure(failures=len(broke), observed_s=run.progress.trained_s)
    return SavePace(exposure=exposure, every_steps=run.progress.save_every)


def with_host(run: Run, host: HostState) -> Run:
    return replace(run, hosts=replace(run.hosts, by_name={**run.hosts.by_name, host.name: host}))


def with_findings(run: Run, findings: Findings | None) -> Run:
    return replace(run, interruption=replace(run.interruption, findings=findings))


def with_leaving(run: Run, leaving: Leaving | None) -> Run:
    return replace(run, interruption=replace(run.interruption, leaving=leaving))


def with_incident(run: Run, incident: Incident) -> Run:
    incidents = (*run.history.incidents, incident)
    return replace(run, history=replace(run.history, incidents=incidents))


def with_deadline(run: Run, deadline: float) -> Run:
    """Extends or shortens the present stage; other stages have no deadline."""
    match run.stage:
        case Waiting() | Holding() | Checking() | Diagnosing() | Stopping():
            return replace(run, stage=replace(run.stage, deadline=deadline))
        case _:
            return run


def is_overdue(run: Run, at: float) -> bool:
    """Whether the present stage has lasted too long; a stage without a deadline never has."""
    match run.stage:
        case Waiting() | Holding() | Checking() | Diagnosing() | Stopping():
            return at >= run.stage.deadline
        case _:
            return False

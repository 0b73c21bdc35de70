"""The state of a job: a frozen value, the fold of its journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.contract.checkpoint_interval import Exposure, SavePace
from orchestrator.contract.launch import Allocation, Cause
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.messages.events import (
    JobSubmitted,
    StragglerFound,
)
from orchestrator.contract.plan import Plan
from orchestrator.contract.skipped_batches import Window
from orchestrator.job.findings import Findings
from orchestrator.job.host_state import Away, HostState, Replaced
from orchestrator.job.incident import Incident
from orchestrator.job.plans import JobPlan, Rollback, Shortage
from orchestrator.job.stage import Stage, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """An orderly stop that is nobody's fault: ranks that end during it are expected to."""

    cause: Cause | Literal["growing"] | None
    """None while the scheduler has not been asked."""
    words: str
    requeue: bool = True
    """Or else the job goes on within its allocation, on other hosts."""
    straggler: StragglerFound | None = None
    """Whose host is given up."""

    @property
    def by_choice(self) -> bool:
        """The job's own: nobody takes hosts away, so what breaks meanwhile is a failure as ever."""
        return self.cause == "growing" or self.straggler is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job. Small whatever its size: what grows with ranks or steps is left to the views."""

    job: JobSubmitted | None = None
    stage: Stage = Stage.SUBMITTED
    since: float = 0.0
    """When the stage began."""
    deadline: float | None = None
    """When the stage has lasted too long."""
    reason: str = ""
    """Why the stage was entered, ready to print."""
    ending: Ending | None = None
    """Set when the job has ended."""
    cancelled_by: str | None = None
    last_at: float = 0.0
    """Time of the last event that changed anything."""

    hosts: Mapping[str, HostState] = field(default_factory=dict)
    """Every host whose agent ever registered in this launch."""
    settle_until: float = 0.0
    """Until then a new leader waits for spares as well, to choose among all hosts."""
    placement: tuple[str, ...] = ()
    """Hosts of the present attempt in node-rank order."""
    done: Mapping[str, bool] = field(default_factory=dict)
    """Host of the attempt that has no process left -> did all its ranks return 0."""

    leader: str = ""
    """Host of the present leader, or the last one."""
    allocation: Allocation | None = None
    """What the scheduler granted; None without one."""
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
    left_out: tuple[str, ...] = ()
    """Hosts that the scheduler was asked to do without, and was not told since that it need not."""
    replaced: Mapping[str, Replaced] = field(default_factory=dict)
    """Those of them that this job decided to do without: no later leader uses them either, unless a
    person has cleared or pinned them since."""
    cleared: Mapping[str, float] = field(default_factory=dict)
    """Hosts that a person said are in order again -> when: what was before does not count."""
    away: Mapping[str, Away] = field(default_factory=dict)
    """Those that were sent away, for others to come, since the newest attempt began."""
    given_back: int = 0
    """How often all hosts were given back for want of some, since the newest attempt began."""
    short_since: float = 0.0
    """When hosts were first waited for that had not come when all were given back."""
    refitted: JobPlan | None = None
    """In place of the job's own plan, which did not fit into memory."""
    replanned: JobPlan | None = None
    """For fewer hosts than were asked for."""
    larger: tuple[JobPlan, ...] = ()
    """The plans for more hosts that were given up for `replanned`, the largest first."""
    allocations: int = 0
    """That began, the present one among them, since there was a new checkpoint or a person last
    submitted; with successors leaders, since there was an attempt."""
    allocations_since: float = 0.0
    """When the first of them began."""
    grown_at: float | None = None
    """When the job was last stopped to go back to one of them."""
    asked_at: float = 0.0
    """When agents were last asked for on hosts that are missing for them."""
    shortage: Shortage | None = None
    """A plan for less memory is being looked for."""
    device_bytes: int | None = None
    """What is believed of a device since a plan did not fit."""
    refits: int = 0
    """How often a plan for less memory was taken."""
    replanning: int | None = None
    """For how many hosts a plan is being looked for."""
    refused: int | None = None
    """The fewest hosts for which there is none, since the number of hosts last changed."""
    always: tuple[str, ...] = ()
    """Hosts that no incident excludes: they are pinned."""
    checks: int = 0
    """How often hosts were tried together."""
    checking: tuple[str, ...] = ()
    """The hosts that are being tried."""
    leaving: Leaving | None = None

    attempt: int = 0
    restarts: int = 0
    fruitless: int = 0
    """Restarts since the last new checkpoint: what the budget counts."""
    step: int = 0
    """Last step reported by the present attempt."""
    saved: int = 0
    """Newest complete checkpoint's step; 0 for none."""
    saved_at: float | None = None
    """When it was complete; None where the journal does not say."""
    saves: tuple[int, ...] = ()
    """The last few of them, oldest first."""
    skipped: tuple[Window, ...] = ()
    """Data that is left out on purpose."""
    rollbacks: tuple[Rollback, ...] = ()
    """Since a person last submitted the job."""
    save_every: int | None = None
    """Steps between two checkpoints, where the ranks have found that out (`checkpoint.every`)."""
    trained_s: float = 0.0
    """Of all attempts, as far as steps were reported."""
    stepped_at: float = 0.0
    """When one last was."""
    fired: tuple[int, ...] = ()
    """Drills that have happened."""
    fired_now: tuple[int, ...] = ()
    """Those of the present attempt."""
    stragglers: Mapping[int, StragglerFound] = field(default_factory=dict)
    """Ranks of the present attempt that keep their peers waiting."""
    findings: Findings | None = None
    incidents: tuple[Incident, ...] = ()
    advanced: int = 0
    """Incidents before the last new checkpoint: the job got on in spite of them."""
    forgiven: int = 0
    """Incidents before a person last submitted the job: a fix may have come with that."""

    @property
    def current(self) -> JobPlan:
        """What the ranks run by; only of a job that was submitted."""
        return self.replanned or self.full

    @property
    def full(self) -> JobPlan:
        """For as many hosts as were asked for."""
        assert self.job is not None
        return self.refitted or JobPlan(plan=self.job.plan, number=self.job.plan_number)

    @property
    def plan(self) -> Plan:
        return self.current.plan

    @property
    def state(self) -> State:
        match self.stage:
            case Stage.ENDED:
                return self.ending or "FAILED"
            case Stage.SUBMITTED:
                return "SUBMITTED"
            case Stage.QUEUED:
                return "PENDING"
            case _ if self.recovering:
                return "RECOVERING"
            case Stage.WAITING | Stage.HOLDING:
                return "PENDING"
            case Stage.STARTING | Stage.CHECKING:
                return "STARTING"
            case _:
                return "RUNNING"

    @property
    def recovering(self) -> bool:
        """Something broke, and training has not made a new step since."""
        if self.findings is not None:
            return True
        return bool(self.incidents) and self.incidents[-1].recovered_after_s is None


def pace_of(run: Run) -> SavePace:
    """What the next attempt is to know of how often the job broke: neither what was rehearsed, nor
    what befell hosts while no rank ran on them."""
    broke = [one for one in run.incidents if one.drill is None and one.saved is not None]
    exposure = Exposure(failures=len(broke), observed_s=run.trained_s)
    return SavePace(exposure=exposure, every_steps=run.save_every)

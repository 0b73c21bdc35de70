"""The state of a job: a frozen value, the fold of its journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from orchestrator.contract.checkpoint_interval import Exposure, SavePace
from orchestrator.contract.launch import Allocation, Breakdown, Cause
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.messages.events import (
    AgentLost,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HostStopped,
    JobSubmitted,
    RankExited,
    StragglerFound,
)
from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.plan import Plan
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.failures import Remedy, Scope
from orchestrator.host_strikes import MOST_EVIDENCE

State = Literal[
    "SUBMITTED",
    "PENDING",
    "STARTING",
    "RUNNING",
    "RECOVERING",
    "SUSPENDED",
    "SUCCEEDED",
    "FAILED",
    "CANCELLED",
]
ENDED: tuple[State, ...] = ("SUCCEEDED", "FAILED", "CANCELLED")


class Stage(Enum):
    """Where the state machine stands; `Run.state` says it in the user's words."""

    SUBMITTED = "submitted"
    WAITING = "waiting for agents"
    HOLDING = "waiting before a restart"
    """For what may heal by itself; agents may come and go meanwhile."""
    CHECKING = "checking hosts"
    STARTING = "starting ranks"
    RUNNING = "training"
    DIAGNOSING = "gathering evidence"
    STOPPING = "stopping ranks"
    QUEUED = "back in the scheduler's queue"
    ENDED = "ended"


LIVE = (Stage.STARTING, Stage.RUNNING, Stage.DIAGNOSING)
"""An attempt is under way and has not been told to stop."""

IDLE = (Stage.WAITING, Stage.HOLDING, Stage.CHECKING)
"""Between two attempts: no rank runs."""

OUTSIDE = (Stage.SUBMITTED, Stage.QUEUED, Stage.ENDED)
"""No agent belongs to the job then."""


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
class Culprit:
    """Who caused an incident; None where it is not known, or nobody did."""

    host: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return self.host or "nobody"
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else ", but no host")


NOBODY = Culprit()

PREFLIGHT = "preflight"
"""Kind of the incident of a host that was found wanting before ranks started on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    exit_code: int | None = None
    signal: str | None = None
    log_tail: tuple[str, ...] = ()
    traceback: str = ""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank to its stack at a hang."""
    notes: tuple[str, ...] = ()
    """How the cause is known, and what evidence is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What went wrong once, and what came of it."""

    id: int
    attempt: int
    at: float
    """When it happened, as near as is known."""
    kind: str
    cause: str
    culprit: Culprit
    evidence: Evidence
    action: str
    """What ndctl did about it."""
    step: int
    """The last step known to be done."""
    saved: int | None = None
    """Newest complete checkpoint's step then, and the one that the next attempt went on from once
    that is known: the steps since are made again. None where no rank ran, so that none are."""
    signature: str = ""
    """Exception, message and step: two incidents that share it are the program's own error."""
    detected_after_s: float
    recovered_after_s: float | None = None
    """From `at` to the first new step of a later attempt; None while that has not come."""
    drill: str | None = None
    """The drill that made it happen."""
    failure: str = ""
    """Its class."""
    scope: Scope = "rank"
    phase: Phase | None = None
    remedy: Remedy | None = None
    """What was decided; None where a person decided."""
    rule: str = ""
    """Of the policy, which decided."""
    advice: str = ""
    """What a person should do about it."""
    edits: tuple[str, ...] = ()
    """Each a way to go on that does not meet it again, the best first: what is typed behind
    `ndctl submit SPEC --resume`."""
    confidence: float | None = None
    """0 to 1, of a verdict that was weighed; None: what is said was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is known so far of the trouble of the present attempt."""

    opened_at: float
    """When the first sign of it was seen."""
    exits: tuple[RankExited, ...] = ()
    lost: tuple[AgentLost, ...] = ()
    returned: tuple[str, ...] = ()
    """Hosts among these whose agent was there all the time, and is heard again."""
    hang: HangDetected | None = None
    within: Stage = Stage.RUNNING
    """Where the attempt was when evidence was asked for; or the job, as hosts went between two."""
    evidence: tuple[EvidenceGathered, ...] = ()
    judged: HangJudged | None = None
    """What the evidence amounts to."""
    judge_by: float | None = None
    """When that is waited for no longer; None where nobody was asked."""
    asked_after: bool = False
    """Evidence was asked for after the last rank had ended."""
    stopped: tuple[HostStopped, ...] = ()
    stuck: tuple[AgentLost, ...] = ()
    """Hosts given up because their ranks did not end: seldom the cause."""
    broke: Breakdown | None = None
    """What ended the allocation, or all agents in it."""
    leader_lost: float | None = None
    """When the former leader was last heard, where the attempt has no end."""
    leader_host: str | None = None
    """Where it ran, if that host is not the only one there is."""
    leader_ended: str = ""
    """How, where that was looked at."""
    noticed_at: float = 0.0
    """When that was noticed."""
    before_cancel: bool = False
    """Of a job that somebody cancelled: it was in trouble before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A plan and the number under which the run directory has it."""

    plan: Plan
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What the planner says to a plan that did not fit into memory."""

    found: JobPlan | None
    """One that takes less and trains the same; None where there is none, or none was asked for."""
    why: str
    """What it does otherwise, or why there is none."""
    ways: tuple[str, ...] = ()
    """What a person could change, the cheapest first."""
    edits: tuple[str, ...] = ()
    """The same without its price: what is typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    to: int
    """Step of the checkpoint; 0 for the beginning."""
    since: int
    """The first bad step after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The present plan does not fit into the devices' memory."""

    device_bytes: int
    """What is believed of a device from now on."""
    adopt: bool
    """Go on with a plan that fits into so much; or else end with the ways out."""
    words: str
    """What the job ends with, unless it goes on."""


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


def evidence_lines(incident: Incident) -> tuple[str, ...]:
    """What shows it, in a few lines: how it is known, and the end of the log."""
    found = incident.evidence
    left = MOST_EVIDENCE - len(found.notes[:MOST_EVIDENCE])
    tail = found.log_tail[-left:] if left else ()
    return (*found.notes[:MOST_EVIDENCE], *tail)

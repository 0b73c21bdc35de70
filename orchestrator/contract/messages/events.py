"""What happens to a job: facts, in the past tense, each a line of the journal.

Each fact has this one type from the process that notices it to the journal. A rank, an agent or a
detector builds the event. An agent fills in with `replace` what its rank cannot know.

`at` is the leader's time in unix seconds, from a clock that never jumps while the leader lives.
Only this clock counts, so events that others build have `at = 0.0` until the leader takes them in
(`stamped`). An event that no decision depends on is journalled too when a person wants to see it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from orchestrator.contract.check_results import Finding
from orchestrator.contract.files.checkpoint_names import PassedOver
from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.drills import Drill
from orchestrator.contract.spec.failures import ExitReading, FailureRule, Reading, Scope
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.contract.spec.types import Step

Health = Literal["ok", "slow", "silent", "dead"]
Span = tuple[int, int]
"""Ranks from the first to the last."""
Above = Literal["keeper", "torchrun", "launcher"]
"""A process above a rank. The kernel kills the rank when it dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A person asked for the job, or with `resume` for its continuation."""

    at: float
    backend: str
    steps: int
    plan: Plan
    plan_number: int
    launch: LaunchPlan
    max_restarts: int
    hang_timeout: float | None
    """Seconds; None adapts to the step time."""
    init_timeout: float
    stop_grace: float
    drills: tuple[Drill, ...] = ()
    resume: bool = False
    shrink: bool = False
    min_hosts: int = 1
    preflight: bool = False
    policy: tuple[PolicyRule, ...] = ()
    """The user's rules, which go before ndctl's."""
    failure_classes: tuple[FailureRule, ...] = ()
    """The user's, which go before ndctl's."""
    on_oom: Literal["stop", "replan"] = "stop"
    on_nan: Literal["stop", "rollback"] = "stop"
    replace_stragglers: bool = False
    checkpoint_timeout: float | None = None
    """Seconds; None as long as any file system takes."""
    keep_attempts: int = 100
    """Attempts whose logs, traces and profiles stay."""
    max_allocations: int | None = None
    """In a row without a new checkpoint; None: without limit, as in journals of older versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderStarted:
    at: float
    host: str
    pid: int
    allocation: Allocation | None = None
    """What the scheduler granted; None where hosts are those of the launch."""
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Hosts that broke jobs before -> why they are not to be used."""
    always: tuple[str, ...] = ()
    """Hosts that a person wants to be used whatever happens on them."""
    cleared: Mapping[str, float] = field(default_factory=dict)
    """Hosts that a person said are in order again -> when that last was."""
    taken: str = ""
    """Why the scheduler itself ended the leader before this one; empty: it says nothing of that."""
    unable: str = ""
    """Why it cannot lead, and the job ends."""
    former: str = ""
    """How the leader before this one ended, from whom it took over in the same allocation."""
    reached: Reached | None = None
    """How far the newest attempt had come, as its metrics say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRegistered:
    at: float = 0.0
    host: str
    address: str
    devices: int
    pid: int
    incarnation: str
    """Drawn by each agent process at its start: in containers, process ids repeat."""
    findings: tuple[Finding, ...] = ()
    """What is not in order on the host."""
    running: int = 0
    """The attempt whose ranks it still has; 0: none."""
    taken: str = ""
    """Why the scheduler itself ended the agent that was there before; empty: it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    at: float
    host: str
    why: str
    silent_s: float
    """Seconds since its last word."""
    taken: str = ""
    """Why the scheduler itself ended it; empty: it says nothing of that."""
    cut_off_s: float = 0.0
    """For so long the leader heard no agent and no scheduler either: which of the hosts was cut off
    is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResumed:
    """Rank 0 loaded the state of `step`, or began at step 0."""

    at: float = 0.0
    attempt: int
    step: Step
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReached:
    """The first step of an attempt, and then one at a time for the record; not every step."""

    at: float = 0.0
    attempt: int
    step: int
    loss: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    at: float = 0.0
    attempt: int
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """The checkpoint of `step` could not be written; training goes on and tries again."""

    at: float = 0.0
    attempt: int
    step: Step
    why: str
    reading: Reading | None = None
    """The failure class of `why`, filled in by the agent; None: no class fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSlow:
    """Training waited much longer for the checkpoint of `step` than for those before it."""

    at: float = 0.0
    attempt: int
    step: int
    took_s: float
    """The blocking part on rank 0; what is written in the background does not count."""
    usual_s: float
    """The median of the attempt's checkpoints before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIntervalChanged:
    """From `step` on checkpoints are written after another number of steps."""

    at: float = 0.0
    attempt: int
    step: Step
    old: int
    new: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged:
    """How long ago ranks were heard, in words; told when the word changes, of all together of which
    it changes at once to the same: a standstill is everybody's."""

    at: float = 0.0
    attempt: int
    ranks: tuple[Span, ...]
    health: Health
    age_s: float
    """Since the last word of the one that was heard the longest ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFound:
    """A rank's own work, not its waiting, has kept its peers waiting for some time."""

    at: float = 0.0
    attempt: int
    rank: int
    host: str
    own_s: float
    """What it took in a step before it entered its first collective."""
    peers_s: float
    """The median of those that do the same work."""
    step_s: float
    steps: int
    """So many were looked at."""
    lost_tokens_per_second: float | None
    """What the whole job would do more without it; None where the job's rate is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerGone:
    """The rank keeps up with its peers again."""

    at: float = 0.0
    attempt: int
    rank: int
    host: str
    own_s: float
    peers_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillHappened:
    at: float = 0.0
    attempt: int
    drill: int
    rank: int
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """The Python exception that ended a rank."""

    error: str
    message: str
    step: Step
    traceback: str
    since: int | None = None
    """The first step that was bad, where training went astray over several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process ended.

    The rank's watcher reports every end with the fields up to `step`. The agent fills in the rest,
    and reports only ends other than a return of 0 after the last step.
    """

    at: float = 0.0
    """When it ended."""
    attempt: int
    rank: int
    host: str = ""
    exit_code: int | None
    """None when a signal killed it."""
    signal: int | None
    """Both are None when its watcher died with it, so that nothing saw how it ended."""
    step: Step = 0
    """Optimizer steps that it had done."""
    stopped: bool = False
    """It ended after its agent had begun to stop the attempt: a consequence, never a cause."""
    detected_after_s: float = 0.0
    error: RankError | None = None
    log_tail: tuple[str, ...] = ()
    """A few lines. The agent classified it by more lines than these."""
    phase: Phase | None = None
    """The last phase that it reported."""
    reading: ExitReading | None = None
    """The failure class; None: the agent did not classify it, and the class is unknown."""
    above: Above | None = None
    """The process above the rank that `signal` killed, and the rank with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDetected:
    at: float = 0.0
    attempt: int
    phase: Phase
    step: int
    stalled_s: float
    """Seconds since any rank last made progress."""
    limit_s: float
    behind: tuple[int, ...]
    """Ranks that reported fewer steps than the others; empty when all are level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangOver:
    """Ranks that were taken for stuck move again, before they were stopped."""

    at: float = 0.0
    attempt: int
    rank: int
    """One of those that moved."""
    step: int
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """What could be learned of one rank at a hang."""

    rank: int
    pid: int
    process_state: str
    """Linux's letter (R, S, D, T, Z, …) or `gone`."""
    step: int
    phase: Phase
    age_s: float
    """Seconds since its last datagram."""
    stack: tuple[str, ...]
    """Innermost frame of each thread first; empty when the process did not answer."""
    place: str = ""
    """Of a process in state D: the function of the kernel in which it waits, and of which module,
    as far as that may be read."""
    still_s: float = 0.0
    """Seconds since its step or phase changed …"""
    starved_s: float = 0.0
    """… and how many of them it was ready to run and had no processor."""
    throttled: bool = False
    """Its control group used up its share of the processors in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceGathered:
    at: float = 0.0
    attempt: int
    host: str
    ranks: tuple[RankEvidence, ...]
    """Of a large job without stacks: these are in the traces, and those that matter in the
    verdict."""
    dumps: int = 0
    """How many flight recorders were dumped."""
    withheld: tuple[int, ...] = ()
    """Ranks that ran, and gave no dump in time."""
    unread: tuple[int, ...] = ()
    """Ranks of which there is no stack because storage did not give it."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What evidence did not come -> why."""
    findings: tuple[Finding, ...] = ()
    """What the host's probes found that is not in order."""
    kernel: tuple[str, ...] = ()
    """What its kernel said that has a class, of the attempt, and since shortly before its ranks got
    on for the last time."""
    readings: tuple[Reading, ...] = ()
    """What these lines mean, the first of each class."""
    unasked: bool = False
    """Of a host on which a rank has ended: it speaks for itself, and no other is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangJudged:
    """What the evidence of all ranks amounts to (`orchestrator/diagnosis/`)."""

    at: float
    attempt: int
    verdict: str
    """A kind of `orchestrator/diagnosis/hang/verdicts.py`; not-known is one as well."""
    cause: str
    scope: Scope | None
    """None: not known."""
    ranks: tuple[int, ...]
    """To blame, the likeliest first; empty blames nobody."""
    hosts: tuple[str, ...]
    """To leave out; empty unless that is sure."""
    confidence: float
    signs: tuple[str, ...] = ()
    """How it is known, and what evidence is missing."""
    waiting: tuple[str, ...] = ()
    """Where the others wait."""
    advice: str = ""
    num_dumps: int = 0
    num_stacks: int = 0
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of those to blame, and of one of each crowd."""
    took_s: float = 0.0
    """For the analysis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStopped:
    """Every process of the attempt on this host is gone."""

    at: float = 0.0
    attempt: int
    host: str
    finished: bool
    """All its ranks returned 0 after the last step."""
    why: str = ""
    """What torchrun itself said, where it is to blame."""
    reading: Reading | None = None
    """The class of that, where a restart meets it again."""
    alone_s: float = 0.0
    """How long ago its agent had last heard the leader, if it stopped the ranks for that; 0: it did
    not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    at: float
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked:
    """The scheduler takes the allocation back, or is about to: told when the signal comes, and
    again when the scheduler has been asked why."""

    at: float
    cause: Cause | None
    """None at first."""
    words: str
    """The signal, or what the scheduler answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeaving:
    """The scheduler takes this host out of the job, and its agent ends soon; another may come in
    its place, here or elsewhere."""

    at: float = 0.0
    host: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFlagged:
    """The scheduler holds something against a host of the allocation."""

    at: float
    host: str
    state: str
    reason: str
    lets_finish: bool = False
    """What runs there may run to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOpened:
    """The scheduler holds nothing against a host any more of which it did."""

    at: float
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUnavailable:
    """No agent can be had on a host any more."""

    at: float
    host: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsChecked:
    """The hosts were tried together before ranks start on them."""

    at: float
    check: int
    unfit: Mapping[str, str]
    """Host -> what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """There is a plan for as many hosts as were asked for."""

    at: float
    plan: Plan
    plan_number: int
    device_bytes: int | None = None
    """That it fits into, where that was what was asked for."""
    why: str = ""
    """What it does otherwise than the one before, where that did not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanRefused:
    at: float
    hosts: int
    why: str
    device_bytes: int | None = None
    """That nothing is to exceed, where that was what was asked for."""
    ways: tuple[str, ...] = ()
    """What a person could change instead, the cheapest first, as it is typed, with its price."""
    edits: tuple[str, ...] = ()
    """The same without its price; empty in journals of an older ndctl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirLost:
    """The run directory was moved or removed; of one that was moved the journal says so."""

    at: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueRefused:
    """The scheduler does not take the job back, and it is in vain to ask it again."""

    at: float
    why: str
    cancelled: bool = False
    """Because somebody has cancelled it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Journalled only when a deadline was reached."""

    at: float


RankEvent = (
    TrainingResumed
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointIntervalChanged
    | DrillHappened
    | RankExited
)
"""Events that a rank, or its watcher, may send to its agent. Nothing else in them is trusted: the
agent checks the attempt and overwrites what it knows itself."""

AgentEvent = RankEvent | HostStopped | HostLeaving
"""Events that an agent reports as they are. `EvidenceGathered` and `AgentRegistered` travel within
a message that has more than the event."""

Notice = CheckpointFailed | CheckpointSlow | HealthChanged
"""Events that no decision depends on: `step` leaves the job as it is."""

Event = (
    JobSubmitted
    | LeaderStarted
    | AgentRegistered
    | AgentLost
    | AgentEvent
    | Notice
    | StepReached
    | StragglerFound
    | StragglerGone
    | HangDetected
    | HangOver
    | EvidenceGathered
    | HangJudged
    | CancelRequested
    | LeaveAsked
    | HostFlagged
    | HostOpened
    | HostUnavailable
    | HostsChecked
    | Replanned
    | ReplanRefused
    | RequeueRefused
    | RunDirLost
    | Tick
)

E = TypeVar("E", bound=Event)


def stamped(event: E, now: float) -> E:
    """`event` with the leader's time: `now`, or earlier by `detected_after_s` for a rank's end."""
    age_s = event.detected_after_s if isinstance(event, RankExited) else 0.0
    return replace(event, at=now - age_s)

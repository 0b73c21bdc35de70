"""Events: facts about a job, in the past tense. Each is a line of the journal.

A fact has the same type everywhere, from the process that notices it to the journal. A rank, an
agent or a detector creates the event. An agent adds with `replace` what its rank cannot know.

`at` is the leader's time in Unix seconds, from a clock that never jumps while the leader lives.
Only this clock counts, so events from other processes have `at = 0.0` until the leader receives
them (`stamped`). Some events influence no decision and are journalled only for the user.
"""

from collections.abc import Mapping
from typing import Literal, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ndctl.rank.phases import Phase
from orchestrator.contract.check_results import Finding
from orchestrator.contract.drills import Drill
from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.failures import ExitReading, FailureRule, Reading, Scope
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.contract.spec.reporting.notify_spec import NotifySpec
from orchestrator.contract.spec.reporting.web_spec import WebSpec
from orchestrator.contract.spec.run_spec import Keep, RunSpec
from orchestrator.contract.spec.types import Step

Health = Literal["ok", "slow", "silent", "dead"]
Span = tuple[int, int]
"""First and last rank of a range."""
WarningKind = Literal["gpu-memory", "gpu", "links", "throttling"]
"""What a host warns of: memory errors of a GPU, another error of one, a link that is lost again and
again, a GPU that its hardware slows down."""
Above = Literal["keeper", "torchrun", "launcher"]
"""A process that started a rank. The kernel kills the rank when this process dies."""


class JobSubmitted(Struct, frozen=True, kw_only=True):
    """A user submitted the job, or with `resume` its continuation."""

    at: float
    backend: str
    steps: int
    """0: unknown, because the ranks run the user's own program."""
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
    """Rules of the spec, which go before ndctl's."""
    failure_classes: tuple[FailureRule, ...] = ()
    """Failure classes of the spec, which go before ndctl's."""
    on_oom: Literal["stop", "replan"] = "stop"
    on_nan: Literal["stop", "rollback"] = "stop"
    replace_stragglers: bool = False
    replace_warned: bool = False
    """A spare replaces a host that warns of its own failure. False in journals of older versions.
    """
    checkpoint_timeout: float | None = None
    """Seconds; None: the default for any file system."""
    keep_attempts: int = 100
    """Number of attempts whose logs, traces and profiles are kept."""
    max_allocations: int | None = None
    """Allowed in a row without a new checkpoint; None: no limit, as in journals of older versions.
    """
    run: RunSpec | None = None
    """The user's own program; None: the bundled trainer."""
    keep: Keep | None = None
    """Which checkpoints of the program are kept."""
    notify: tuple[NotifySpec, ...] = ()
    """Who is told of incidents and ends."""
    web: WebSpec | None = None
    """The leader's server for metrics and pages."""
    in_memory: bool = False
    """Ranks keep checkpoints in the memory of their hosts too."""
    copies: int = 0
    """Copies of each of them on other hosts."""
    copy_bytes_per_s: int | None = None
    """What a host sends of them at most."""
    keep_ranks: bool = False
    """Ranks that did not fail keep their processes between two attempts."""
    reached: Reached | None = None
    """How far the last attempt of an earlier launch got, according to its metrics."""
    group: str = ""
    """Name under which commands find this job together with others, such as those of a sweep."""


class LeaderStarted(Struct, frozen=True, kw_only=True):
    at: float
    host: str
    pid: int
    allocation: Allocation | None = None
    """What the scheduler granted; None: the hosts are those of the launch."""
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Hosts that broke earlier jobs -> why they must not be used."""
    always: tuple[str, ...] = ()
    """Hosts that the user wants to use in any case."""
    cleared: Mapping[str, float] = field(default_factory=dict)
    """Hosts that a user has cleared -> when that last happened."""
    taken: str = ""
    """Why the scheduler itself ended the previous leader; empty: it gave no reason."""
    unable: str = ""
    """Why this leader cannot lead, so that the job ends."""
    former: str = ""
    """How the previous leader in the same allocation ended."""
    host_works: bool = False
    """The host of that leader has shown that it works: only its process had ended."""
    heard: float | None = None
    """When the agent that leads now last heard the previous leader."""
    reached: Reached | None = None
    """How far the newest attempt got, according to its metrics."""
    boot: str = ""
    """The kernel's id of the last boot of `host`; empty if that is not known."""


class AgentRegistered(Struct, frozen=True, kw_only=True):
    at: float = 0.0
    host: str
    address: str
    devices: int
    pid: int
    incarnation: str
    """Random id of the agent process. Process ids repeat in containers."""
    findings: tuple[Finding, ...] = ()
    """Problems that were found on the host."""
    running: int = 0
    """The attempt whose ranks still run there; 0: none."""
    taken: str = ""
    """Why the scheduler itself ended the previous agent there; empty: it gave no reason."""
    boot: str = ""
    """The kernel's id of the last boot of the host; empty if that is not known."""
    former_stopped: bool = False
    """It found the host's former agent stopped by a signal, and killed it."""


class AgentLost(Struct, frozen=True, kw_only=True):
    at: float
    host: str
    why: str
    silent_s: float
    """Seconds since the leader last heard the agent."""
    taken: str = ""
    """Why the scheduler itself ended it; empty: it gave no reason."""
    closed: bool = False
    """The host closed the agent's connection, which a host without power or network cannot do."""
    cut_off_s: float = 0.0
    """Seconds for which the leader reached neither an agent nor the scheduler. It is then unknown
    which of the hosts was cut off."""


class TrainingResumed(Struct, frozen=True, kw_only=True):
    """Rank 0 loaded the state of `step`, or started at step 0."""

    at: float = 0.0
    attempt: int
    step: Step
    passed_over: tuple[SkippedCheckpoint, ...] = ()
    in_memory: bool = False
    """From a checkpoint in the memory of the hosts."""


class ProgramRuns(Struct, frozen=True, kw_only=True):
    """All ranks of a user's program have been alive for a while, and no step was reported."""

    at: float = 0.0
    attempt: int


class StepReached(Struct, frozen=True, kw_only=True):
    """The first step of an attempt, and then one at intervals for the record; not every step."""

    at: float = 0.0
    attempt: int
    step: int
    loss: float | None
    tokens_per_second: float | None


class CheckpointSaved(Struct, frozen=True, kw_only=True):
    at: float = 0.0
    attempt: int
    step: Step


class CheckpointFailed(Struct, frozen=True, kw_only=True):
    """The checkpoint of `step` could not be written. Training continues and tries again."""

    at: float = 0.0
    attempt: int
    step: Step
    why: str
    reading: Reading | None = None
    """The failure class of `why`, filled in by the agent; None: no class matches."""


class CheckpointSlow(Struct, frozen=True, kw_only=True):
    """The checkpoint of `step` stopped training for much longer than the previous ones."""

    at: float = 0.0
    attempt: int
    step: int
    took_s: float
    """The blocking part on rank 0, without the writing in the background."""
    usual_s: float
    """Median of the attempt's previous checkpoints."""


class JournalDelayed(Struct, frozen=True, kw_only=True):
    """The write of the events before this one took `waited_s` seconds. The leader acts on nothing
    that is not on disk, so what it did about them came that much later."""

    at: float = 0.0
    waited_s: float
    why: str
    """The last error of a write; empty if the write was only slow."""


class NoticeSent(Struct, frozen=True, kw_only=True):
    """A receiver was told of something, or could not be told, or need not be told."""

    at: float
    notice: str
    """What it is about, such as `incident-3`."""
    receiver: str
    """Number and kind of the entry in `notify`, such as `1 slack`."""
    delivered: bool
    tries: int
    why: str = ""
    """Why it was not delivered; `quiet_for`: it need not be."""


class CheckpointIntervalChanged(Struct, frozen=True, kw_only=True):
    """From `step` on, checkpoints are written every `new` steps."""

    at: float = 0.0
    attempt: int
    step: Step
    old: int
    new: int
    why: str


class MemoryCheckpointsSet(Struct, frozen=True, kw_only=True):
    """From now on in this attempt, ranks keep checkpoints in the memory of their hosts, or none."""

    at: float = 0.0
    attempt: int
    copies: int | None
    """Of each on other hosts; None: nothing is kept in memory."""
    host_bytes: int = 0
    """Memory that they take on the host with most."""
    why: str = ""
    """Why there are none, or fewer copies than the spec asks for."""


class LogGrew(Struct, frozen=True, kw_only=True):
    """The log of a rank of the user's program has reached `size`, which is 1 GiB or a power of 2
    times as much."""

    at: float = 0.0
    attempt: int
    rank: int
    size: int
    """Bytes."""
    per_second: float
    """Bytes per second since the last look, about a second before."""


class HealthChanged(Struct, frozen=True, kw_only=True):
    """The health of ranks changed. All ranks that change to the same health at the same time share
    one event, because a standstill affects all of them."""

    at: float = 0.0
    attempt: int
    ranks: tuple[Span, ...]
    health: Health
    age_s: float
    """Seconds since the last message of the rank that was silent longest."""


class StragglerFound(Struct, frozen=True, kw_only=True):
    """A rank's own work, without its waiting, has delayed its peers for some time."""

    at: float = 0.0
    attempt: int
    rank: int
    host: str
    own_s: float
    """Seconds per step of the rank before its first collective."""
    peers_s: float
    """The median of the ranks that do the same work."""
    step_s: float
    steps: int
    """Number of steps that were compared."""
    lost_tokens_per_second: float | None
    """How much faster the whole job would be without it; None: the job's rate is unknown."""


class StragglerGone(Struct, frozen=True, kw_only=True):
    """The rank is as fast as its peers again."""

    at: float = 0.0
    attempt: int
    rank: int
    host: str
    own_s: float
    peers_s: float


class DrillHappened(Struct, frozen=True, kw_only=True):
    at: float = 0.0
    attempt: int
    drill: int
    rank: int
    step: Step


class RankError(Struct, frozen=True, kw_only=True):
    """The Python exception that ended a rank."""

    error: str
    message: str
    step: Step
    """In which step; 0: in none that the program has reported."""
    traceback: str
    since: int | None = None
    """The first bad step, if training went wrong over several steps."""
    memory_snapshot: str = ""
    """File with the state of the GPU's memory, after it was exhausted; or the folder with those of
    other ranks."""

    @property
    def said(self) -> str:
        """`ValueError: boom`, as Python prints it: without a message there is no colon."""
        return f"{self.error}: {self.message}" if self.message.strip() else self.error


class RankExited(Struct, frozen=True, kw_only=True):
    """A rank's process ended.

    The rank's watcher reports every end with the fields up to `step`. The agent fills in the rest,
    and reports only ends other than a return of 0 after the last step, and with a program of the
    user the returns of 0 before another rank failed.
    """

    at: float = 0.0
    """When it ended."""
    attempt: int
    rank: int
    host: str = ""
    exit_code: int | None
    """None if a signal killed it."""
    signal: int | None
    """Both are None if its watcher died with it, so that nothing saw how it ended."""
    step: Step = 0
    """Optimizer steps that it had done."""
    stopped: bool = False
    """It ended after its agent began to stop the attempt, so its end is never the cause."""
    detected_after_s: float = 0.0
    error: RankError | None = None
    log_tail: tuple[str, ...] = ()
    """The last few lines. The agent classified the end with more lines than these."""
    phase: Phase | None = None
    """The last phase that it reported."""
    reading: ExitReading | None = None
    """The failure class; None: the agent did not classify it, so the class is unknown."""
    above: Above | None = None
    """The parent process that `signal` killed, and with it the rank."""
    ended_first: bool = False
    """It returned 0 in a program of the user, and other ranks went on and failed."""


class HangDetected(Struct, frozen=True, kw_only=True):
    at: float = 0.0
    attempt: int
    phase: Phase
    step: int
    stalled_s: float
    """Seconds since any rank last made progress."""
    limit_s: float
    behind: tuple[int, ...]
    """Ranks that reported fewer steps than the others; empty if all reported the same."""


class HangOver(Struct, frozen=True, kw_only=True):
    """Ranks that seemed to hang made progress again before they were stopped."""

    at: float = 0.0
    attempt: int
    rank: int
    """One of the ranks that made progress."""
    step: int
    phase: Phase


class RankEvidence(Struct, frozen=True, kw_only=True):
    """What is known about one rank at a hang."""

    rank: int
    pid: int
    process_state: str
    """State letter of Linux (R, S, D, T, Z, …) or `gone`."""
    step: int
    phase: Phase
    age_s: float
    """Seconds since its last datagram."""
    stack: tuple[str, ...]
    """Innermost frame of each thread first; empty if the process did not respond."""
    place: str = ""
    """For a process in state D: the kernel function in which it waits, and its module, as far as
    the kernel shows them."""
    still_s: float = 0.0
    """Seconds since its step or phase changed."""
    starved_s: float = 0.0
    """Part of `still_s` in which it was ready to run but had no CPU."""
    throttled: bool = False
    """Its control group used up its CPU quota in that time."""


class EvidenceGathered(Struct, frozen=True, kw_only=True):
    at: float = 0.0
    attempt: int
    host: str
    ranks: tuple[RankEvidence, ...]
    """Without stacks if the job is large. Stacks are in the traces, and the important ones in the
    verdict."""
    dumps: int = 0
    """Number of flight recorder dumps."""
    withheld: tuple[int, ...] = ()
    """Ranks that were running but gave no dump in time."""
    unread: tuple[int, ...] = ()
    """Ranks whose stack could not be read because storage did not respond."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Evidence that could not be collected -> why."""
    ended: Mapping[str, str] = field(default_factory=dict)
    """Rank -> how it had ended before the evidence was collected. It was not asked for anything."""
    findings: tuple[Finding, ...] = ()
    """Problems that the host's probes found."""
    kernel: tuple[str, ...] = ()
    """Lines of its kernel log that match a failure class, from this attempt and from shortly before
    its ranks last made progress."""
    readings: tuple[Reading, ...] = ()
    """The classes of these lines, one reading per class, the first line of each."""
    unasked: bool = False
    """Sent without a request, after a rank ended on the host. No other host is asked then."""


class HangJudged(Struct, frozen=True, kw_only=True):
    """The verdict over the evidence of all ranks (`orchestrator/diagnosis/`)."""

    at: float
    attempt: int
    verdict: str
    """A kind of `orchestrator/diagnosis/hang/verdicts.py`, which includes one for unknown."""
    cause: str
    scope: Scope | None
    """None: unknown."""
    ranks: tuple[int, ...]
    """Culprits, the most likely first; empty: no culprit."""
    hosts: tuple[str, ...]
    """Hosts to exclude; empty unless the culprit is certain."""
    confidence: float
    signs: tuple[str, ...] = ()
    """The evidence for it, and the evidence that is missing."""
    waiting: tuple[str, ...] = ()
    """Where the other ranks wait."""
    advice: str = ""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stacks of the culprits, and of one rank of each group that waits in the same place."""
    took_s: float = 0.0
    """Seconds that the analysis took."""


class HostStopped(Struct, frozen=True, kw_only=True):
    """Every process of the attempt on this host is gone, or has left the attempt."""

    at: float = 0.0
    attempt: int
    host: str
    finished: bool
    """All its ranks returned 0 after the last step."""
    why: str = ""
    """The error of torchrun itself, if that was the cause."""
    reading: Reading | None = None
    """The failure class of `why`, if a restart would fail in the same way."""
    killed: tuple[int, ...] = ()
    """Ranks that still ran when the grace after SIGTERM ended."""
    alone_s: float = 0.0
    """Seconds since the agent last heard the leader, if it stopped the ranks for that reason; else
    0."""
    kept: bool = False
    """The ranks have left the attempt, and their processes wait for the next one."""


class CancelRequested(Struct, frozen=True, kw_only=True):
    at: float
    by: str
    led: bool = True
    """False: the job has no leader that could be asked, so this event is its end."""
    asked_at: float | None = None
    """Not `led`: when a leader that had the journal was asked. It did not answer, as it was
    suspended or not reachable, so its processes were ended. Only a failure before that is an
    incident. None: no leader had the journal."""
    reached: Reached | None = None
    """Without a leader: how far the newest attempt got, according to its metrics."""


class LeaveAsked(Struct, frozen=True, kw_only=True):
    """The scheduler takes the allocation back or is about to. Sent when the signal arrives, and
    again after the scheduler was asked for the cause."""

    at: float
    cause: Cause | None
    """None in the first event, before the scheduler was asked."""
    words: str
    """The signal, or the scheduler's answer."""


class HostLeaving(Struct, frozen=True, kw_only=True):
    """The scheduler takes this host away, and its agent ends soon. Another agent may take its
    place, on this host or another."""

    at: float = 0.0
    host: str
    why: str


class HostWarned(Struct, frozen=True, kw_only=True):
    """A host reports that it will fail soon, or that it slows its peers down. Its ranks still
    train."""

    at: float = 0.0
    host: str
    problem: WarningKind
    what: str
    """The device, and what it reports."""
    lasts: bool = True
    """False: the problem has ended."""
    age_s: float = 0.0
    """Seconds since its agent noticed it, if the agent repeats it."""


class HostFlagged(Struct, frozen=True, kw_only=True):
    """The scheduler has flagged a host of the allocation, for example as draining."""

    at: float
    host: str
    state: str
    reason: str
    lets_finish: bool = False
    """Running work may finish there."""
    down: bool = False
    """The host has failed, in the scheduler's view."""


class HostOpened(Struct, frozen=True, kw_only=True):
    """A flagged host is no longer flagged."""

    at: float
    host: str


class HostUnavailable(Struct, frozen=True, kw_only=True):
    """The backend can start no more agents on a host."""

    at: float
    host: str
    why: str


class HostsChecked(Struct, frozen=True, kw_only=True):
    """The hosts were checked together before ranks start on them."""

    at: float
    check: int
    unfit: Mapping[str, str]
    """Host -> what is wrong with it."""


class Replanned(Struct, frozen=True, kw_only=True):
    """A plan for the requested number of hosts was found."""

    at: float
    plan: Plan
    plan_number: int
    device_bytes: int | None = None
    """The memory that the plan had to fit into, if that was the request."""
    why: str = ""
    """What differs from the previous plan, if that one did not fit."""


class ReplanRefused(Struct, frozen=True, kw_only=True):
    at: float
    hosts: int
    why: str
    device_bytes: int | None = None
    """The memory limit, if that was the request."""
    ways: tuple[str, ...] = ()
    """Alternatives for the user, cheapest first, ready to type, each with its cost."""
    edits: tuple[str, ...] = ()
    """The same without the cost; empty in journals of older versions."""


class RunDirLost(Struct, frozen=True, kw_only=True):
    """The run directory was moved or removed. If it was moved, its journal has this event."""

    at: float
    why: str


class RequeueRefused(Struct, frozen=True, kw_only=True):
    """The scheduler refuses to requeue the job, and asking again is useless."""

    at: float
    why: str
    cancelled: bool = False
    """Because the job was cancelled in the scheduler."""


class Tick(Struct, frozen=True, kw_only=True):
    """Time passed. Journalled only if a deadline was reached."""

    at: float


RankEvent = (
    TrainingResumed
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointIntervalChanged
    | MemoryCheckpointsSet
    | DrillHappened
    | LogGrew
    | RankExited
)
"""Events that a rank or its watcher may send to its agent. The agent does not trust their contents:
it checks the attempt and overwrites what it knows itself."""

AgentEvent = RankEvent | HostStopped | HostLeaving | HostWarned
"""Events that an agent reports unchanged. `EvidenceGathered` and `AgentRegistered` are parts of
larger messages."""

Notice = CheckpointFailed | CheckpointSlow | HealthChanged | JournalDelayed | LogGrew | NoticeSent
"""Events that influence no decision: `step` returns the job unchanged."""

Event = (
    JobSubmitted
    | LeaderStarted
    | AgentRegistered
    | AgentLost
    | AgentEvent
    | Notice
    | ProgramRuns
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
    """`event` with the leader's time: `now`, or earlier for what the agent noticed earlier."""
    match event:
        case RankExited():
            age_s = event.detected_after_s
        case HostWarned():
            age_s = event.age_s
        case _:
            age_s = 0.0
    return replace(event, at=now - age_s)

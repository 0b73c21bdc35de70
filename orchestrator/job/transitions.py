"""The state machine of one job: `step(run, event) -> (run, actions)`.

`TABLE` says which function handles an event in each stage. Nothing else changes the state of a job.
There is no clock and no I/O: every event carries its time, and time passing is the event `Tick`.
So replaying a journal's events gives the same state and the same actions.

    SUBMITTED -> WAITING -> STARTING -> RUNNING -> ENDED
                 ^  ^           |           |
                 |  |           +--> DIAGNOSING (a hang) --+
                 |  |           +--------------------------+--> STOPPING --> ENDED
                 |  +----------------------------------------------+
                 +------ HOLDING (a failure may be transient) <----+
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from msgspec.structs import replace

from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    CheckpointIntervalChanged,
    CheckpointSaved,
    DrillHappened,
    Event,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HangOver,
    HostFlagged,
    HostLeaving,
    HostOpened,
    HostsChecked,
    HostStopped,
    HostUnavailable,
    HostWarned,
    JobSubmitted,
    LeaderStarted,
    LeaveAsked,
    MemoryCheckpointsSet,
    Notice,
    ProgramRuns,
    RankExited,
    Replanned,
    ReplanRefused,
    RequeueRefused,
    RunDirLost,
    StepReached,
    StragglerFound,
    StragglerGone,
    Tick,
    TrainingResumed,
)
from orchestrator.job import deadlines
from orchestrator.job.attempt_end import host_stopped, rank_exited
from orchestrator.job.failures.cancellation import cancel_requested
from orchestrator.job.failures.hangs import (
    evidence_gathered,
    hang_detected,
    hang_judged,
    hang_over,
)
from orchestrator.job.hosts.agent_membership import (
    agent_lost,
    agent_registered,
    host_unavailable,
    old_ranks_gone,
)
from orchestrator.job.hosts.scheduler import (
    host_flagged,
    host_leaving,
    host_opened,
    hosts_checked,
    leave_asked,
    replan_refused,
    replanned,
    requeue_refused,
)
from orchestrator.job.hosts.straggler_replacement import straggler_found, straggler_gone
from orchestrator.job.hosts.warned_hosts import host_warned
from orchestrator.job.leader_change import (
    cancelled_without_leader,
    job_submitted,
    leader_after_end,
    leader_started,
)
from orchestrator.job.leave import Result, run_dir_lost
from orchestrator.job.stage import (
    ATTEMPT,
    IDLE,
    Checking,
    Diagnosing,
    Ended,
    Holding,
    Queued,
    Running,
    Stage,
    Starting,
    Stopping,
    Submitted,
    Waiting,
)
from orchestrator.job.state import Run
from orchestrator.job.training import (
    checkpoint_saved,
    drill_happened,
    interval_changed,
    memory_set,
    program_runs,
    step_reached,
    training_resumed,
)

Handler = Callable[[Run, Any], Result]
Stages = tuple[type[Stage], ...]


def no_effect(run: Run, event: Event) -> Result:
    """The event may come in this stage, but it is late, or it only informs a person."""
    return run, ()


def _cancelled(run: Run, event: CancelRequested) -> Result:
    return cancel_requested(run, event) if event.led else cancelled_without_leader(run, event)


STAGES: Stages = get_args(Stage)
LED: Stages = (*IDLE, *ATTEMPT)
"""A leader and its agents are at work."""
AFTER: Stages = (Queued, Ended)
"""Leader and agents are about to end. What they report now comes too late."""


def _row(*cases: tuple[Stages, Handler]) -> Mapping[type[Stage], Handler]:
    """The handlers of one event. The first case that names a stage counts."""
    row: dict[type[Stage], Handler] = {}
    for stages, handler in cases:
        for stage in stages:
            row.setdefault(stage, handler)
    return row


def _of_an_attempt(handler: Handler, *stages: type[Stage]) -> Mapping[type[Stage], Handler]:
    """An event that counts in `stages` of an attempt, and may come late in any stage after them."""
    return _row((stages or ATTEMPT, handler), ((*LED, *AFTER), no_effect))


def _whenever(handler: Handler) -> Mapping[type[Stage], Handler]:
    """An event that tells how far training came. It counts, however late it comes."""
    return _row(((*LED, *AFTER), handler))


def _from_leader(handler: Handler) -> Mapping[type[Stage], Handler]:
    """An event of a leader or its agents that counts as long as they are at work."""
    return _row((LED, handler), (AFTER, no_effect))


TABLE: Mapping[type[Event], Mapping[type[Stage], Handler]] = {
    # A person, or a leader that starts, in any stage.
    JobSubmitted: _row((STAGES, job_submitted)),
    LeaderStarted: _row(((Ended,), leader_after_end), (STAGES, leader_started)),
    CancelRequested: _row(((Ended,), no_effect), (STAGES, _cancelled)),
    RunDirLost: _row(((Ended,), no_effect), (STAGES, run_dir_lost)),
    # Agents and hosts.
    AgentRegistered: _from_leader(agent_registered),
    AgentLost: _from_leader(agent_lost),
    HostUnavailable: _from_leader(host_unavailable),
    HostStopped: _row((ATTEMPT, host_stopped), (IDLE, old_ranks_gone), (AFTER, no_effect)),
    HostsChecked: _of_an_attempt(hosts_checked, Checking),
    HostWarned: _from_leader(host_warned),
    # The scheduler and the planner.
    HostFlagged: _from_leader(host_flagged),
    HostOpened: _from_leader(host_opened),
    HostLeaving: _from_leader(host_leaving),
    LeaveAsked: _from_leader(leave_asked),
    RequeueRefused: _row(((Queued,), requeue_refused), ((Ended,), no_effect)),
    Replanned: _from_leader(replanned),
    ReplanRefused: _from_leader(replan_refused),
    # Ranks.
    TrainingResumed: _whenever(training_resumed),
    ProgramRuns: _of_an_attempt(program_runs, Starting),
    StepReached: _whenever(step_reached),
    CheckpointSaved: _whenever(checkpoint_saved),
    CheckpointIntervalChanged: _whenever(interval_changed),
    MemoryCheckpointsSet: _of_an_attempt(memory_set),
    DrillHappened: _whenever(drill_happened),
    StragglerFound: _of_an_attempt(straggler_found),
    StragglerGone: _of_an_attempt(straggler_gone),
    RankExited: _row((ATTEMPT, rank_exited), (STAGES, no_effect)),
    # Hangs.
    HangDetected: _of_an_attempt(hang_detected, Starting, Running),
    HangOver: _of_an_attempt(hang_over, Diagnosing),
    EvidenceGathered: _of_an_attempt(evidence_gathered, Diagnosing, Stopping),
    HangJudged: _of_an_attempt(hang_judged, Diagnosing, Stopping),
    # Time.
    Tick: _row(
        ((Waiting,), deadlines.waiting),
        ((Holding,), deadlines.holding),
        ((Checking,), deadlines.checking),
        ((Running,), deadlines.running),
        ((Diagnosing,), deadlines.diagnosing),
        ((Stopping,), deadlines.stopping),
        ((Submitted, Starting, Queued, Ended), no_effect),
    ),
    # Events that only inform a person.
    **{kind: _row((STAGES, no_effect)) for kind in get_args(Notice)},
}
"""Event -> stage -> handler. A pair without a handler cannot happen: `step` counts it."""


def step(run: Run, event: Event) -> Result:
    """The state after `event`, and the actions that follow. `run` itself is returned if nothing
    does."""
    if run.job is None and not isinstance(event, JobSubmitted):
        return run, ()
    attempt = getattr(event, "attempt", run.attempt.number)
    if attempt != run.attempt.number and not _is_of_old_ranks(run, event):
        return run, ()  # late news of an earlier attempt
    handler = TABLE[type(event)].get(type(run.stage))
    if handler is None:
        return _ignored(run, event), ()
    after, actions = handler(run, event)
    if after is run and not actions:
        return run, ()
    return replace(after, last_at=_seen_at(event)), actions


def fold(events: Iterable[Event], run: Run | None = None) -> Run:
    """The state after `events`."""
    run = run or Run()
    for event in events:
        run, _ = step(run, event)
    return run


def _seen_at(event: Event) -> float:
    """When the leader learned of the event. A rank's exit carries the time at which it ended."""
    return event.at + event.detected_after_s if isinstance(event, RankExited) else event.at


def _is_of_old_ranks(run: Run, event: Event) -> bool:
    """An agent that came back with ranks of an earlier attempt reports that these are gone."""
    known = run.hosts.by_name.get(event.host) if isinstance(event, HostStopped) else None
    return known is not None and known.back and getattr(event, "attempt", 0) == known.runs


def _ignored(run: Run, event: Event) -> Run:
    """The pair of event and stage cannot happen. Count it, so that `ndctl describe --json` shows
    the defect, and change nothing else."""
    name = f"{type(event).__name__} in {type(run.stage).__name__}"
    ignored = {**run.history.ignored, name: run.history.ignored.get(name, 0) + 1}
    return replace(run, history=replace(run.history, ignored=ignored))

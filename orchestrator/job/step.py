"""The supervisor's one decision: `step(run, event) -> (run, actions)`.

No clock, no I/O: every event carries its own time, and time passing is the event `Tick`. Rules
that change the state of a job live here, in `leader_change.py` (a launch or a leader begins), in
`hosts/` (agents come and go, a scheduler's wishes), in `failures/` and in `stage_transitions.py`
(from stage to stage), and nowhere else. Replaying a journal's events gives the same state and the
same actions.

    SUBMITTED -> WAITING -> STARTING -> RUNNING -> ENDED
                 ^  ^           |           |
                 |  |           +--> DIAGNOSING (a hang) --+
                 |  |           +--------------------------+--> STOPPING --> ENDED
                 |  +----------------------------------------------+
                 +------ HOLDING (what may heal by itself) <-------+
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import assert_never

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
    JobSubmitted,
    LeaderStarted,
    LeaveAsked,
    Notice,
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
from orchestrator.job.cancellation import cancelled, did_not_hang
from orchestrator.job.failures import no_progress
from orchestrator.job.failures.diagnose import Weight, weigh
from orchestrator.job.failures.exit_classification import breaks_its_host, failure_of
from orchestrator.job.failures.hangs import (
    diagnose_watchdog,
    evidence_gathered,
    goes_on_diagnosing,
    hang_detected,
    hang_judged,
    hang_over,
    watchdog_spoke,
)
from orchestrator.job.findings import Findings
from orchestrator.job.host_state import HostState
from orchestrator.job.hosts import scale_up
from orchestrator.job.hosts.agent_membership import (
    agent_lost,
    asked_again,
    outage_is_over,
    registered,
    unavailable,
)
from orchestrator.job.hosts.scheduler import (
    host_flagged,
    host_leaving,
    host_opened,
    hosts_checked,
    leave_asked,
    leave_drained,
    replan_refused,
    replanned,
    requeue_refused,
)
from orchestrator.job.hosts.straggler_replacement import (
    replace_straggler,
    straggler_found,
    straggler_gone,
)
from orchestrator.job.incident import Incident
from orchestrator.job.leader_change import leader_started, submitted
from orchestrator.job.stage import LIVE, Stage
from orchestrator.job.stage_transitions import (
    FAILED_GRACE_S,
    Result,
    all_done,
    checked,
    conclude,
    end,
    recover,
    start_if_ready,
    stop,
    stop_or_conclude,
    wait,
)
from orchestrator.job.state import Run

MOST_SAVES = 16
"""Checkpoints that are remembered; more than a job keeps."""
MOST_EXITS = 64
"""Exits kept for the diagnosis; at 16,384 ranks the rest are symptoms of these."""


def step(run: Run, event: Event) -> Result:
    """Decide what follows `event`; `run` itself comes back when nothing does."""
    if run.job is None and not isinstance(event, JobSubmitted):
        return run, ()
    if getattr(event, "attempt", run.attempt) != run.attempt and not _frees_host(run, event):
        return run, ()  # late news of an attempt that is over
    after, actions = _apply(run, event)
    if after is run and not actions:
        return run, ()
    return replace(after, last_at=_seen_at(event)), actions


def _seen_at(event: Event) -> float:
    """When the leader learned of it: an exit carries the time at which the rank ended."""
    return event.at + event.detected_after_s if isinstance(event, RankExited) else event.at


def _frees_host(run: Run, event: Event) -> bool:
    """Whether no rank is left where an agent came back with some of an attempt that is over."""
    known = run.hosts.get(event.host) if isinstance(event, HostStopped) else None
    return known is not None and known.back and getattr(event, "attempt", 0) == known.runs


def fold(events: Iterable[Event], run: Run | None = None) -> Run:
    """The state after `events`."""
    run = run or Run()
    for event in events:
        run, _ = step(run, event)
    return run


def _apply(run: Run, event: Event) -> Result:  # noqa: C901 - one line for each event
    match event:
        case JobSubmitted():
            return submitted(run, event)
        case LeaderStarted():
            return leader_started(run, event)
        case AgentRegistered():
            return registered(run, event)
        case AgentLost():
            return agent_lost(run, event)
        case TrainingResumed():
            return _resumed(run, event), ()
        case StepReached():
            return _step_reached(run, event)
        case CheckpointSaved():
            return _checkpoint_saved(run, event)
        case DrillHappened():
            fired, now = (*run.fired, event.drill), (*run.fired_now, event.drill)
            return replace(run, fired=fired, fired_now=now), ()
        case RankExited():
            return _rank_exited(run, event)
        case HangDetected():
            return hang_detected(run, event)
        case HangOver():
            return hang_over(run, event)
        case EvidenceGathered():
            return evidence_gathered(run, event)
        case HangJudged():
            return hang_judged(run, event)
        case HostStopped():
            return _host_stopped(run, event)
        case CancelRequested():
            return _cancel_requested(run, event)
        case LeaveAsked():
            return leave_asked(run, event)
        case HostFlagged():
            return host_flagged(run, event)
        case HostOpened():
            return host_opened(run, event)
        case HostLeaving():
            return host_leaving(run, event)
        case HostUnavailable():
            return unavailable(run, event)
        case HostsChecked():
            return hosts_checked(run, event)
        case Replanned():
            return replanned(run, event)
        case ReplanRefused():
            return replan_refused(run, event)
        case RequeueRefused():
            return requeue_refused(run, event)
        case RunDirLost(at=at, why=why):
            # Agents leave with the end of the job, and with them their ranks.
            return (run, ()) if run.stage is Stage.ENDED else end(run, at, "FAILED", why)
        case StragglerFound():
            return straggler_found(run, event), ()
        case StragglerGone():
            return straggler_gone(run, event), ()
        case CheckpointIntervalChanged(new=new):
            return replace(run, save_every=new), ()
        case Tick():
            return _tick(run, event)
        case _ if isinstance(event, Notice):
            return run, ()
        case _:
            assert_never(event)


def _resumed(run: Run, event: TrainingResumed) -> Run:
    """What was loaded had been saved, even where the news of it died with a leader."""
    run = replace(run, step=event.step, incidents=tuple(_going_on(run, event)))
    if event.step <= run.saved:
        return run
    saves = (*run.saves, event.step)[-MOST_SAVES:]
    # It was saved before the attempt in which that happened had ended.
    advanced = max(run.advanced, len(run.incidents) - 1)
    run = replace(run, saves=saves, fruitless=min(run.fruitless, 1), advanced=advanced)
    return no_progress.was_saved(replace(run, saved=event.step, saved_at=None), event.at)


def _going_on(run: Run, event: TrainingResumed) -> Iterator[Incident]:
    """The incidents that the job recovers from just now, with the checkpoint that it goes on from:
    the leader may have died before it heard of the newest one, or that could not be read."""
    for incident in run.incidents:
        open_still = incident.recovered_after_s is None and incident.attempt < event.attempt
        if open_still and incident.saved is not None:
            yield replace(incident, saved=event.step)
        else:
            yield incident


def _step_reached(run: Run, event: StepReached) -> Result:
    since = run.stepped_at if run.stage is Stage.RUNNING else event.at
    trained_s = run.trained_s + max(0.0, event.at - since)
    run = replace(run, step=event.step, stepped_at=event.at, trained_s=trained_s)
    if run.stage is not Stage.STARTING:
        return run, ()
    incidents = tuple(
        replace(incident, recovered_after_s=max(0.0, event.at - incident.at))
        if incident.recovered_after_s is None
        else incident
        for incident in run.incidents
    )
    reason = f"attempt {run.attempt} trains"
    return replace(run, stage=Stage.RUNNING, since=event.at, reason=reason, incidents=incidents), ()


def _checkpoint_saved(run: Run, event: CheckpointSaved) -> Result:
    if event.step > run.saved:
        saves = (*run.saves, event.step)[-MOST_SAVES:]
        run = replace(run, saved=event.step, saved_at=event.at, saves=saves, fruitless=0)
        run = no_progress.advanced(replace(run, advanced=len(run.incidents)))
    left, actions = leave_drained(run, event.at)
    if actions:
        return left, actions
    wish = scale_up.wish(run, event.at)
    if wish is None:
        return replace_straggler(run, event.at)
    job = run.job
    assert job is not None
    return stop(replace(run, leaving=wish, grown_at=event.at), event.at, wish.words, job.stop_grace)


def _rank_exited(run: Run, event: RankExited) -> Result:
    if run.stage not in (*LIVE, Stage.STOPPING):
        return run, ()
    if run.leaving is not None:
        if not _fails_on_its_way_out(run, event):
            return run, ()
        # A cause, though its agent was stopping it; and why the ranks leave is that from now on.
        run, event = replace(run, leaving=None), replace(event, stopped=False)
    if did_not_hang(run, event):
        return replace(run, findings=None), ()
    seen_at = _seen_at(event)
    found = run.findings or Findings(opened_at=seen_at)
    if any(exited.rank == event.rank for exited in found.exits):
        return run, ()  # said again after a reconnection
    watchdog = watchdog_spoke(run, event) and not run.cancelled_by
    if not (run.cancelled_by and (event.stopped or _was_told_to(event))):
        kept = _keep(found.exits, event)
        if kept is not found.exits:  # at 16,384 ranks nearly all that are stopped change nothing
            run = replace(run, findings=replace(found, exits=kept))
    if run.stage is Stage.STOPPING or goes_on_diagnosing(run, event):
        return run, ()
    if watchdog:
        return diagnose_watchdog(run, event, seen_at)
    return stop(run, seen_at, f"rank {event.rank} on {event.host} ended", FAILED_GRACE_S)


def _fails_on_its_way_out(run: Run, event: RankExited) -> bool:
    """Whether a rank that was to write a checkpoint and leave did not merely do so.

    All agree to leave, so some are gone before their own agent hears of it. What a rank says that
    was told to can be of the stop itself, but for what only hardware causes.
    """
    if run.leaving is None or not run.leaving.by_choice:
        return False
    if event.stopped:
        return breaks_its_host(event)
    return not _was_told_to(event) and weigh(event) is Weight.CAUSE


def _was_told_to(event: RankExited) -> bool:
    """By its own words, though its agent knew of no stop yet."""
    found = failure_of(event)
    return found is not None and found.scope == "scheduler"


def _keep(exits: tuple[RankExited, ...], new: RankExited) -> tuple[RankExited, ...]:
    """The first exits; one that may be the cause is kept however many symptoms came before it."""
    if len(exits) < MOST_EXITS:
        return (*exits, new)
    spare = next((exited for exited in reversed(exits) if _is_consequence(exited)), None)
    if spare is None or _is_consequence(new):
        return exits
    return (*(exited for exited in exits if exited is not spare), new)


def _is_consequence(exited: RankExited) -> bool:
    return exited.stopped or weigh(exited) is not Weight.CAUSE


def _host_stopped(run: Run, event: HostStopped) -> Result:
    known = run.hosts.get(event.host)
    if known is not None and known.back and event.attempt == known.runs:
        clean = replace(known, alive=True, back=False)
        run = replace(run, hosts={**run.hosts, event.host: clean})
        if run.stage is Stage.WAITING:
            return start_if_ready(run, event.at)
    if event.attempt != run.attempt:
        return run, ()
    if run.stage not in (*LIVE, Stage.STOPPING) or event.host not in run.placement:
        return run, ()
    failed = not event.finished and run.cancelled_by is None and run.leaving is None
    found = run.findings
    if failed:
        found = found or Findings(opened_at=event.at)
        found = replace(found, stopped=(*found.stopped, event))
    run = replace(run, done={**run.done, event.host: event.finished}, findings=found)
    if run.stage is Stage.STOPPING or failed or all_done(run):
        return stop_or_conclude(run, event.at, f"torchrun ended on {event.host}")
    return run, ()


def _cancel_requested(run: Run, event: CancelRequested) -> Result:
    if run.stage is Stage.ENDED or run.cancelled_by is not None:
        return run, ()
    run = cancelled(run, event.by)
    assert run.job is not None
    reason = f"cancelled by {event.by}"
    if run.stage is Stage.STOPPING:
        return conclude(run, event.at) if all_done(run) else (run, ())
    if run.stage in LIVE:
        return stop(run, event.at, reason, run.job.stop_grace)
    return end(run, event.at, "CANCELLED", reason)


def _tick(run: Run, event: Tick) -> Result:
    if run.stage is Stage.WAITING and (run.findings or event.at >= run.settle_until):
        run, actions = _after_outage(run, event.at)
        if actions:
            return run, actions
    if run.stage is Stage.RUNNING:
        return scale_up.ask(run, event.at)
    if run.deadline is None or event.at < run.deadline:
        return run, ()
    if run.stage is Stage.WAITING:
        return run, ()  # `start_if_ready` has looked at the deadline
    if run.stage is Stage.HOLDING:
        return _after_outage(wait(run, event.at, run.reason), event.at)
    if run.stage is Stage.CHECKING:
        return checked(run, event.at, {})
    if run.stage is Stage.DIAGNOSING:
        return stop(run, event.at, run.reason, FAILED_GRACE_S)
    return _stop_overdue(run, event.at)


def _after_outage(run: Run, at: float) -> Result:
    """Start if hosts are there; but what took some of them while no rank ran is judged first."""
    if run.findings is not None and outage_is_over(run, at):
        return recover(run, run.findings, at)
    return start_if_ready(run, at)


def _stop_overdue(run: Run, at: float) -> Result:
    """Hosts that cannot end their ranks are given up, and their agents replaced."""
    stuck = [host for host in run.placement if host not in run.done]
    why = f"its ranks did not end within {at - run.since:.0f} s"
    found = run.findings or Findings(opened_at=at)
    lost = tuple(AgentLost(at=at, host=host, why=why, silent_s=0.0) for host in stuck)
    hosts: Mapping[str, HostState] = {
        name: replace(host, alive=False, back=False, lost_at=at) if name in stuck else host
        for name, host in run.hosts.items()
    }
    run = replace(run, hosts=hosts, done={**run.done, **dict.fromkeys(stuck, False)})
    if run.leaving is None or run.leaving.by_choice:
        found = replace(found, stuck=lost)
        return conclude(replace(run, leaving=None, findings=found), at)
    why_known = run.leaving.cause or "unknown"  # it had long enough to be told
    again = asked_again(run, stuck, why)
    run, actions = conclude(replace(run, leaving=replace(run.leaving, cause=why_known)), at)
    return run, (*again, *actions)

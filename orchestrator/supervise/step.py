"""The supervisor's one decision: `step(run, event) -> (run, actions)`.

No clock, no I/O: every event carries its own time, and time passing is the event `Tick`. Rules that
change the state of a job live in this file and nowhere else. Replaying a journal's events gives the
same state and the same actions.

    SUBMITTED -> WAITING -> STARTING -> RUNNING -> ENDED
                    ^           |           |
                    |           +--> DIAGNOSING (a hang) --+
                    |           +--------------------------+--> STOPPING --> ENDED
                    +----------------------------------------------+
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from orchestrator.contract.actions import (
    Action,
    Ending,
    EndJob,
    GatherEvidence,
    ReplaceAgent,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    CheckpointSaved,
    DrillHappened,
    Event,
    EvidenceGathered,
    HangDetected,
    HealthChanged,
    HostStopped,
    JobSubmitted,
    LeaderStarted,
    RankExited,
    StepReached,
    Tick,
    TrainingResumed,
)
from orchestrator.plan.place import place
from orchestrator.supervise.diagnose import Verdict, diagnose
from orchestrator.supervise.policy import decide
from orchestrator.supervise.state import LIVE, Findings, HostState, Incident, Run, Stage

FAILED_GRACE_S = 3.0
"""SIGTERM to SIGKILL when a peer is already dead: no checkpoint can come of it any more."""
STOP_SLACK_S = 15.0
"""After SIGKILL is due, for every agent to say that no process is left."""
EVIDENCE_S = 3.0
"""What agents may take to gather stacks; the supervisor waits a little longer."""
MOST_EXITS = 64
"""Exits kept for the diagnosis; at 16,384 ranks the rest are symptoms of these."""

Result = tuple[Run, tuple[Action, ...]]


def step(run: Run, event: Event) -> Result:
    """Decide what follows `event`; `run` itself comes back when nothing does."""
    if run.job is None and not isinstance(event, JobSubmitted):
        return run, ()
    if getattr(event, "attempt", run.attempt) != run.attempt:
        return run, ()  # late news of an attempt that is over
    after, actions = _apply(run, event)
    if after is run and not actions:
        return run, ()
    return replace(after, last_at=event.at), actions


def fold(events: Iterable[Event], run: Run | None = None) -> Run:
    """The state after `events`."""
    run = run or Run()
    for event in events:
        run, _ = step(run, event)
    return run


def _apply(run: Run, event: Event) -> Result:  # noqa: C901, PLR0911 - one line for each event
    match event:
        case JobSubmitted():
            return _submitted(run, event)
        case LeaderStarted():
            return _leader_started(run, event)
        case AgentRegistered():
            return _registered(run, event)
        case AgentLost():
            return _agent_lost(run, event)
        case TrainingResumed():
            return replace(run, step=event.step), ()
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
            return _hang_detected(run, event)
        case EvidenceGathered():
            return _evidence_gathered(run, event)
        case HostStopped():
            return _host_stopped(run, event)
        case CancelRequested():
            return _cancel_requested(run, event)
        case HealthChanged():
            return run, ()
        case Tick():
            return _tick(run, event)
        case _:
            assert_never(event)


def _submitted(run: Run, event: JobSubmitted) -> Result:
    """A resumed job keeps its history; whatever was under way ended with its leader."""
    kept = run if event.resume else Run()
    after = replace(
        kept,
        job=event,
        stage=Stage.SUBMITTED,
        since=event.at,
        deadline=None,
        reason="submitted again" if event.resume else "submitted",
        ending=None,
        cancelled_by=None,
        hosts={},
        placement=(),
        done={},
        fruitless=0,
        findings=_left_behind(kept, event.at),
    )
    if event.resume:
        # `--drill` of this submission: ids count from 1 again.
        after = replace(after, fired=(), fired_now=())
    return after, ()


def _left_behind(run: Run, at: float) -> Findings | None:
    """An attempt without an end means that the leader died under it."""
    if run.findings is not None and run.findings.leader_lost is not None:
        return run.findings
    if run.stage in (*LIVE, Stage.STOPPING):
        return Findings(opened_at=at, leader_lost=run.last_at, drill=_drill(run))
    return None


def _drill(run: Run) -> str | None:
    """The drill that happened in the present attempt."""
    assert run.job is not None
    return next((str(d) for d in run.job.drills if d.id in run.fired_now), None)


def _leader_started(run: Run, event: LeaderStarted) -> Result:
    assert run.job is not None
    if run.stage is Stage.ENDED and run.ending is not None:
        return run, (EndJob(state=run.ending, reason=f"the job has ended: {run.reason}"),)
    findings = _left_behind(run, event.at)
    waiting = replace(_wait(run, event.at, "waiting for agents"), hosts={}, findings=None)
    if findings is None:
        return waiting, ()
    return _recover(waiting, findings, event.at)


def _wait(run: Run, at: float, reason: str) -> Run:
    assert run.job is not None
    return replace(
        run,
        stage=Stage.WAITING,
        since=at,
        deadline=at + run.job.init_timeout,
        reason=reason,
        done={},
    )


def _registered(run: Run, event: AgentRegistered) -> Result:
    if run.stage in (Stage.SUBMITTED, Stage.ENDED):
        return run, ()
    known = run.hosts.get(event.host)
    if known is not None and known.alive and known.pid == event.pid:
        return run, ()
    actions: tuple[Action, ...] = ()
    if known is not None and known.alive:
        lost = AgentLost(
            at=event.at, host=event.host, why="another agent took its place", silent_s=0.0
        )
        run, actions = _agent_lost(run, lost)
        actions = tuple(a for a in actions if not isinstance(a, ReplaceAgent))
    host = HostState(name=event.host, address=event.address, devices=event.devices, pid=event.pid)
    run = replace(run, hosts={**run.hosts, event.host: host})
    if run.stage is Stage.WAITING:
        run, more = _start_if_ready(run, event.at)
        actions += more
    return run, actions


def _start_if_ready(run: Run, at: float) -> Result:
    """Start the next attempt once enough hosts are there."""
    assert run.job is not None
    plan = run.job.plan
    alive = [
        host.name
        for host in run.hosts.values()
        if host.alive and host.devices >= plan.ranks_per_host
    ]
    if len(alive) < len(plan.hosts):
        return run, ()
    placement = place(plan, alive, run.placement)
    attempt = run.attempt + 1
    origin = f"checkpoint step-{run.saved}" if run.saved else "the beginning"
    reason = f"attempt {attempt} on {len(placement)} hosts from {origin}"
    after = replace(
        run,
        stage=Stage.STARTING,
        since=at,
        deadline=None,
        reason=reason,
        attempt=attempt,
        placement=placement,
        done={},
        fired_now=(),
        findings=None,
    )
    drills = tuple(drill for drill in run.job.drills if drill.id not in run.fired)
    return after, (StartAttempt(attempt=attempt, hosts=placement, drills=drills, reason=reason),)


def _agent_lost(run: Run, event: AgentLost) -> Result:
    known = run.hosts.get(event.host)
    if known is None or not known.alive or run.stage in (Stage.SUBMITTED, Stage.ENDED):
        return run, ()
    run = replace(run, hosts={**run.hosts, event.host: replace(known, alive=False)})
    again = ReplaceAgent(host=event.host, reason=f"the agent of {event.host} is gone: {event.why}")
    if run.stage is Stage.WAITING:
        return _lost_while_waiting(run, event, again)
    if event.host not in run.placement or event.host in run.done:
        return run, (again,)
    found = run.findings or Findings(opened_at=event.at)
    run = replace(
        run,
        findings=replace(found, lost=(*found.lost, event)),
        done={**run.done, event.host: False},
    )
    run, actions = _stop_or_conclude(run, event.at, again.reason)
    return run, (*actions, again) if run.ending is None else actions


def _lost_while_waiting(run: Run, event: AgentLost, again: ReplaceAgent) -> Result:
    """Agents that die before an attempt begins spend the budget too, or it would never end."""
    assert run.job is not None
    if run.fruitless >= run.job.max_restarts:
        return _end(run, event.at, "FAILED", f"{again.reason}; agents keep dying before a start")
    return replace(run, fruitless=run.fruitless + 1), (again,)


def _step_reached(run: Run, event: StepReached) -> Result:
    run = replace(run, step=event.step)
    if run.stage is not Stage.STARTING:
        return run, ()
    incidents = tuple(
        replace(incident, recovered_after_s=event.at - incident.at)
        if incident.recovered_after_s is None
        else incident
        for incident in run.incidents
    )
    reason = f"attempt {run.attempt} trains"
    return replace(run, stage=Stage.RUNNING, since=event.at, reason=reason, incidents=incidents), ()


def _checkpoint_saved(run: Run, event: CheckpointSaved) -> Result:
    if event.step <= run.saved:
        return run, ()
    return replace(run, saved=event.step, fruitless=0), ()


def _rank_exited(run: Run, event: RankExited) -> Result:
    if run.stage not in (*LIVE, Stage.STOPPING):
        return run, ()
    found = run.findings or Findings(opened_at=event.at)
    if any(exited.rank == event.rank for exited in found.exits):
        return run, ()  # said again after a reconnection
    if len(found.exits) < MOST_EXITS and not (run.cancelled_by and event.stopped):
        run = replace(run, findings=replace(found, exits=(*found.exits, event)))
    if run.stage is Stage.STOPPING:
        return run, ()
    return _stop(run, event.at, f"rank {event.rank} on {event.host} ended", FAILED_GRACE_S)


def _hang_detected(run: Run, event: HangDetected) -> Result:
    if run.stage not in (Stage.STARTING, Stage.RUNNING):
        return run, ()
    reason = f"no progress for {event.stalled_s:.1f} s in phase {event.phase}"
    after = replace(
        run,
        stage=Stage.DIAGNOSING,
        since=event.at,
        deadline=event.at + 2 * EVIDENCE_S,
        reason=reason,
        findings=Findings(opened_at=event.at, hang=event),
    )
    return after, (GatherEvidence(attempt=run.attempt, timeout_s=EVIDENCE_S, reason=reason),)


def _evidence_gathered(run: Run, event: EvidenceGathered) -> Result:
    if run.stage is not Stage.DIAGNOSING or run.findings is None:
        return run, ()
    evidence = (*run.findings.evidence, event)
    run = replace(run, findings=replace(run.findings, evidence=evidence))
    if not set(run.placement) <= {part.host for part in evidence}:
        return run, ()
    return _stop(run, event.at, run.reason, FAILED_GRACE_S)


def _host_stopped(run: Run, event: HostStopped) -> Result:
    if run.stage not in (*LIVE, Stage.STOPPING) or event.host not in run.placement:
        return run, ()
    run = replace(run, done={**run.done, event.host: event.finished})
    failed = not event.finished and run.cancelled_by is None
    if failed:
        found = run.findings or Findings(opened_at=event.at)
        run = replace(run, findings=replace(found, stopped=(*found.stopped, event)))
    if run.stage is Stage.STOPPING or failed or _all_done(run):
        return _stop_or_conclude(run, event.at, f"torchrun ended on {event.host}")
    return run, ()


def _stop_or_conclude(run: Run, at: float, reason: str) -> Result:
    if _all_done(run):
        return _conclude(run, at)
    if run.stage is Stage.STOPPING:
        return run, ()
    return _stop(run, at, reason, FAILED_GRACE_S)


def _all_done(run: Run) -> bool:
    return set(run.placement) <= set(run.done)


def _stop(run: Run, at: float, reason: str, grace_s: float) -> Result:
    after = replace(
        run,
        stage=Stage.STOPPING,
        since=at,
        deadline=at + grace_s + STOP_SLACK_S,
        reason=reason,
    )
    return after, (StopAttempt(attempt=run.attempt, grace_s=grace_s, reason=reason),)


def _cancel_requested(run: Run, event: CancelRequested) -> Result:
    assert run.job is not None
    if run.stage is Stage.ENDED or run.cancelled_by is not None:
        return run, ()
    run = replace(run, cancelled_by=event.by)
    reason = f"cancelled by {event.by}"
    if run.stage is Stage.STOPPING:
        return run, ()
    if run.stage in LIVE:
        return _stop(run, event.at, reason, run.job.stop_grace)
    return _end(run, event.at, "CANCELLED", reason)


def _tick(run: Run, event: Tick) -> Result:
    if run.deadline is None or event.at < run.deadline:
        return run, ()
    match run.stage:
        case Stage.WAITING:
            return _end(run, event.at, "FAILED", _too_few(run, event.at))
        case Stage.DIAGNOSING:
            return _stop(run, event.at, run.reason, FAILED_GRACE_S)
        case Stage.STOPPING:
            return _stop_overdue(run, event.at)
        case _:
            return replace(run, deadline=None), ()


def _too_few(run: Run, at: float) -> str:
    assert run.job is not None
    alive = sorted(host.name for host in run.hosts.values() if host.alive)
    needed, limit = len(run.job.plan.hosts), run.job.init_timeout
    return (
        f"{len(alive)} of {needed} hosts registered within {limit:.0f} s"
        f" ({', '.join(alive) or 'none'}); see logs/agent-<host>.log of the others"
    )


def _stop_overdue(run: Run, at: float) -> Result:
    """Hosts that cannot end their ranks are given up, and their agents replaced."""
    stuck = [host for host in run.placement if host not in run.done]
    why = f"its ranks did not end within {at - run.since:.0f} s"
    found = run.findings or Findings(opened_at=at)
    lost = tuple(AgentLost(at=at, host=host, why=why, silent_s=0.0) for host in stuck)
    hosts: Mapping[str, HostState] = {
        name: replace(host, alive=host.alive and name not in stuck)
        for name, host in run.hosts.items()
    }
    run = replace(
        run,
        hosts=hosts,
        done={**run.done, **dict.fromkeys(stuck, False)},
        findings=replace(found, lost=(*found.lost, *lost)),
    )
    return _conclude(run, at)


def _conclude(run: Run, at: float) -> Result:
    """No process of the attempt is left anywhere: say what it came to."""
    if run.findings is None and all(run.done.values()):
        return _end(run, at, "SUCCEEDED", f"all ranks finished in attempt {run.attempt}")
    if run.cancelled_by is not None:
        return _end(run, at, "CANCELLED", f"cancelled by {run.cancelled_by}")
    assert run.findings is not None
    return _recover(run, run.findings, at)


def _recover(run: Run, findings: Findings, at: float) -> Result:
    """Record the incident; start again or give up."""
    verdict = diagnose(findings)
    decision = decide(run, verdict)
    incident = _incident(run, findings, verdict, decision.reason)
    run = replace(run, incidents=(*run.incidents, incident), findings=None)
    if not decision.restart:
        return _end(run, at, "FAILED", decision.reason)
    run = replace(
        _wait(run, at, decision.reason), restarts=run.restarts + 1, fruitless=run.fruitless + 1
    )
    missing = tuple(
        ReplaceAgent(host=host.name, reason=decision.reason)
        for host in run.hosts.values()
        if not host.alive
    )
    run, actions = _start_if_ready(run, at)
    return run, (*missing, *actions)


def _incident(run: Run, findings: Findings, verdict: Verdict, action: str) -> Incident:
    reported = [exited.step for exited in findings.exits]
    reported += [findings.hang.step] if findings.hang else []
    return Incident(
        id=len(run.incidents) + 1,
        attempt=run.attempt,
        at=verdict.at,
        kind=verdict.kind,
        cause=verdict.cause,
        culprit=verdict.culprit,
        evidence=verdict.evidence,
        action=action,
        step=max([run.step, *reported]),
        signature=verdict.signature,
        detected_after_s=verdict.detected_after_s,
        drill=findings.drill or _drill(run),
    )


def _end(run: Run, at: float, ending: Ending, reason: str) -> Result:
    after = replace(
        run,
        stage=Stage.ENDED,
        since=at,
        deadline=None,
        reason=reason,
        ending=ending,
        findings=None,
    )
    return after, (EndJob(state=ending, reason=reason),)

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
from orchestrator.supervise.diagnose import Verdict, Weight, diagnose, weigh
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
    return replace(after, last_at=_seen_at(event)), actions


def _seen_at(event: Event) -> float:
    """When the leader learned of it: an exit carries the time at which the rank ended."""
    return event.at + event.detected_after_s if isinstance(event, RankExited) else event.at


def fold(events: Iterable[Event], run: Run | None = None) -> Run:
    """The state after `events`."""
    run = run or Run()
    for event in events:
        run, _ = step(run, event)
    return run


def _apply(run: Run, event: Event) -> Result:  # noqa: C901 - one line for each event
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
    kept = _interrupted(run, event.at) if event.resume else Run()
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
        forgiven=len(kept.incidents),
        findings=None,
    )
    if event.resume:
        # `--drill` of this submission: ids count from 1 again.
        after = replace(after, fired=(), fired_now=())
    return after, ()


def _interrupted(run: Run, at: float) -> Run:
    """With the incident of an attempt that has no end; a person decided what comes of it."""
    findings = _left_behind(run, at)
    if findings is None:
        return run
    incident = _incident(run, findings, diagnose(findings), "the job was submitted again")
    return replace(run, incidents=(*run.incidents, incident), restarts=run.restarts + 1)


def _left_behind(run: Run, at: float) -> Findings | None:
    """An attempt without an end means that the leader died under it, whatever had gone wrong."""
    if run.stage not in (*LIVE, Stage.STOPPING):
        return None
    return replace(run.findings or Findings(opened_at=at), leader_lost=run.last_at, noticed_at=at)


def _drill(run: Run) -> str | None:
    """The drill that happened in the present attempt."""
    assert run.job is not None
    return next((str(d) for d in run.job.drills if d.id in run.fired_now), None)


def _leader_started(run: Run, event: LeaderStarted) -> Result:
    assert run.job is not None
    if run.stage is Stage.ENDED and run.ending is not None:
        return run, (EndJob(state=run.ending, reason=f"the job has ended: {run.reason}"),)
    if run.cancelled_by is not None:
        return _end(run, event.at, "CANCELLED", f"cancelled by {run.cancelled_by}")
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
    if known is not None and known.pid == event.pid and _may_be_busy(run, event.host):
        return _welcome_back(run, known)
    actions: tuple[Action, ...] = ()
    expected = known is not None and known.back and run.stage is Stage.STOPPING
    if known is not None and (known.alive or expected):
        lost = AgentLost(
            at=event.at, host=event.host, why="another agent took its place", silent_s=0.0
        )
        run, actions = _agent_lost(run, lost)
        itself = {a for a in actions if isinstance(a, ReplaceAgent) and a.host == event.host}
        actions = tuple(a for a in actions if a not in itself)
    host = HostState(name=event.host, address=event.address, devices=event.devices, pid=event.pid)
    run = replace(run, hosts={**run.hosts, event.host: host})
    if run.stage is Stage.WAITING:
        run, more = _start_if_ready(run, event.at)
        actions += more
    return run, actions


def _may_be_busy(run: Run, host: str) -> bool:
    """Whether ranks of an attempt that has been told to stop may still run there."""
    return run.stage in (Stage.STOPPING, Stage.WAITING) and host in run.placement


def _welcome_back(run: Run, known: HostState) -> Result:
    """An agent that was given up too early counts again once it says that no rank is left."""
    reason = f"the agent of {known.name} is back: what it still runs has to end first"
    hosts = {**run.hosts, known.name: replace(known, back=True)}
    done = {host: finished for host, finished in run.done.items() if host != known.name}
    stop = StopAttempt(attempt=run.attempt, grace_s=FAILED_GRACE_S, reason=reason)
    return replace(run, hosts=hosts, done=done), (stop,)


def _start_if_ready(run: Run, at: float) -> Result:
    """Start the next attempt once enough hosts are there."""
    assert run.job is not None
    plan = run.job.plan
    usable = _usable(run)
    if len(usable) < len(plan.hosts):
        return run, ()
    placement = place(plan, usable, run.placement)
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


def _usable(run: Run) -> list[str]:
    """Hosts that can carry their part of the plan."""
    assert run.job is not None
    need = run.job.plan.ranks_per_host
    return [host.name for host in run.hosts.values() if host.alive and host.devices >= need]


def _agent_lost(run: Run, event: AgentLost) -> Result:
    known = run.hosts.get(event.host)
    if known is None or not (known.alive or known.back):
        return run, ()
    if run.stage in (Stage.SUBMITTED, Stage.ENDED):
        return run, ()
    gone = replace(known, alive=False, back=False)
    run = replace(run, hosts={**run.hosts, event.host: gone})
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
    asked = any(isinstance(a, ReplaceAgent) and a.host == event.host for a in actions)
    return run, actions if asked or run.ending is not None else (*actions, again)


def _lost_while_waiting(run: Run, event: AgentLost, again: ReplaceAgent) -> Result:
    """Agents that die before an attempt begins spend the budget too, or it would never end."""
    assert run.job is not None
    if run.fruitless >= run.job.max_restarts:
        return _end(run, event.at, "FAILED", f"{again.reason}; agents keep dying before a start")
    return replace(run, fruitless=run.fruitless + 1), (again,)


def _resumed(run: Run, event: TrainingResumed) -> Run:
    """What was loaded had been saved, even where the news of it died with a leader."""
    run = replace(run, step=event.step)
    if event.step <= run.saved:
        return run
    return replace(run, saved=event.step, fruitless=min(run.fruitless, 1))


def _step_reached(run: Run, event: StepReached) -> Result:
    run = replace(run, step=event.step)
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
    if event.step <= run.saved:
        return run, ()
    return replace(run, saved=event.step, fruitless=0), ()


def _rank_exited(run: Run, event: RankExited) -> Result:
    if run.stage not in (*LIVE, Stage.STOPPING):
        return run, ()
    seen_at = _seen_at(event)
    found = run.findings or Findings(opened_at=seen_at)
    if any(exited.rank == event.rank for exited in found.exits):
        return run, ()  # said again after a reconnection
    if not (run.cancelled_by and event.stopped):
        run = replace(run, findings=replace(found, exits=_keep(found.exits, event)))
    if run.stage is Stage.STOPPING:
        return run, ()
    return _stop(run, seen_at, f"rank {event.rank} on {event.host} ended", FAILED_GRACE_S)


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
    known = run.hosts.get(event.host)
    if known is not None and known.back:
        clean = replace(known, alive=True, back=False)
        run = replace(run, hosts={**run.hosts, event.host: clean})
        if run.stage is Stage.WAITING:
            return _start_if_ready(run, event.at)
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
    if run.stage is Stage.ENDED or run.cancelled_by is not None:
        return run, ()
    run = replace(run, cancelled_by=event.by)
    assert run.job is not None
    reason = f"cancelled by {event.by}"
    if run.stage is Stage.STOPPING:
        return run, ()
    if run.stage in LIVE:
        return _stop(run, event.at, reason, run.job.stop_grace)
    return _end(run, event.at, "CANCELLED", reason)


def _tick(run: Run, event: Tick) -> Result:
    if run.deadline is None or event.at < run.deadline:
        return run, ()
    if run.stage is Stage.WAITING:
        return _end(run, event.at, "FAILED", _too_few(run))
    if run.stage is Stage.DIAGNOSING:
        return _stop(run, event.at, run.reason, FAILED_GRACE_S)
    return _stop_overdue(run, event.at)


def _too_few(run: Run) -> str:
    assert run.job is not None
    plan, limit, usable = run.job.plan, run.job.init_timeout, sorted(_usable(run))
    small = sorted(h.name for h in run.hosts.values() if h.alive and h.name not in usable)
    short = f"; fewer than {plan.ranks_per_host} devices on {', '.join(small)}" if small else ""
    return (
        f"{len(usable)} of {len(plan.hosts)} hosts registered within {limit:.0f} s"
        f" ({', '.join(usable) or 'none'}){short}; see logs/agent-<host>.log of the others"
    )


def _stop_overdue(run: Run, at: float) -> Result:
    """Hosts that cannot end their ranks are given up, and their agents replaced."""
    stuck = [host for host in run.placement if host not in run.done]
    why = f"its ranks did not end within {at - run.since:.0f} s"
    found = run.findings or Findings(opened_at=at)
    lost = tuple(AgentLost(at=at, host=host, why=why, silent_s=0.0) for host in stuck)
    hosts: Mapping[str, HostState] = {
        name: replace(host, alive=False, back=False) if name in stuck else host
        for name, host in run.hosts.items()
    }
    run = replace(
        run,
        hosts=hosts,
        done={**run.done, **dict.fromkeys(stuck, False)},
        findings=replace(found, stuck=lost),
    )
    return _conclude(run, at)


def _conclude(run: Run, at: float) -> Result:
    """No process of the attempt is left anywhere: say what it came to."""
    if all(run.done.values()):  # whatever was feared: a hang may have been a slow last step
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
    ordered = {lost.host for lost in findings.lost}
    missing = tuple(
        ReplaceAgent(host=host.name, reason=decision.reason)
        for host in run.hosts.values()
        if not host.alive and host.name not in ordered
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
        drill=_drill(run),
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

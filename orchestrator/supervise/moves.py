"""The moves of a job: from one stage to the next, with the orders that belong to each."""

from dataclasses import replace

from orchestrator.contract.actions import (
    Action,
    Ending,
    EndJob,
    ReplaceAgent,
    StartAttempt,
    StopAttempt,
)
from orchestrator.plan.placement.place import place, room_for
from orchestrator.supervise.diagnose import Verdict, diagnose
from orchestrator.supervise.policy import decide
from orchestrator.supervise.state import Findings, Incident, Run, Stage

FAILED_GRACE_S = 3.0
"""SIGTERM to SIGKILL when a peer is already dead: no checkpoint can come of it any more."""
STOP_SLACK_S = 15.0
"""After SIGKILL is due, for every agent to say that no process is left."""

Result = tuple[Run, tuple[Action, ...]]


def wait(run: Run, at: float, reason: str) -> Run:
    assert run.job is not None
    return replace(
        run,
        stage=Stage.WAITING,
        since=at,
        deadline=at + run.job.init_timeout,
        reason=reason,
        done={},
    )


def start_if_ready(run: Run, at: float) -> Result:
    """Start the next attempt once enough hosts are there; at first, a while later than that.

    The first hosts to come are not the best ones to take.
    """
    assert run.job is not None
    plan = run.job.plan
    there = usable(run)
    if room_for(plan, there) < len(plan.hosts):
        return run, ()
    if at < run.settle_until and len(there) < len(run.job.launch.hosts):
        return run, ()
    placement = place(
        plan,
        there,
        run.placement or plan.hosts,
        switches=plan.switches,
        traffic=plan.communication,
    )
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


def usable(run: Run) -> list[str]:
    """Hosts that can carry their part of the plan."""
    assert run.job is not None
    need = run.job.plan.ranks_per_host
    return [host.name for host in run.hosts.values() if host.alive and host.devices >= need]


def stop(run: Run, at: float, reason: str, grace_s: float) -> Result:
    after = replace(
        run,
        stage=Stage.STOPPING,
        since=at,
        deadline=at + grace_s + STOP_SLACK_S,
        reason=reason,
    )
    return after, (StopAttempt(attempt=run.attempt, grace_s=grace_s, reason=reason),)


def stop_or_conclude(run: Run, at: float, reason: str) -> Result:
    if all_done(run):
        return conclude(run, at)
    if run.stage is Stage.STOPPING:
        return run, ()
    return stop(run, at, reason, FAILED_GRACE_S)


def all_done(run: Run) -> bool:
    return set(run.placement) <= set(run.done)


def conclude(run: Run, at: float) -> Result:
    """No process of the attempt is left anywhere: say what it came to."""
    if all(run.done.values()):  # whatever was feared: a hang may have been a slow last step
        return end(run, at, "SUCCEEDED", f"all ranks finished in attempt {run.attempt}")
    if run.cancelled_by is not None:
        return end(run, at, "CANCELLED", f"cancelled by {run.cancelled_by}")
    assert run.findings is not None
    return recover(run, run.findings, at)


def recover(run: Run, findings: Findings, at: float) -> Result:
    """Record the incident; start again or give up."""
    verdict = diagnose(findings)
    decision = decide(run, verdict)
    incident = incident_of(run, findings, verdict, decision.reason)
    run = replace(run, incidents=(*run.incidents, incident), findings=None)
    if not decision.restart:
        return end(run, at, "FAILED", decision.reason)
    run = replace(
        wait(run, at, decision.reason), restarts=run.restarts + 1, fruitless=run.fruitless + 1
    )
    ordered = {lost.host for lost in findings.lost}
    missing = tuple(
        ReplaceAgent(host=host.name, reason=decision.reason)
        for host in run.hosts.values()
        if not host.alive and host.name not in ordered
    )
    run, actions = start_if_ready(run, at)
    return run, (*missing, *actions)


def incident_of(run: Run, findings: Findings, verdict: Verdict, action: str) -> Incident:
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


def _drill(run: Run) -> str | None:
    """The drill that happened in the present attempt."""
    assert run.job is not None
    return next((str(d) for d in run.job.drills if d.id in run.fired_now), None)


def end(run: Run, at: float, ending: Ending, reason: str) -> Result:
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

"""Incidents: what went wrong once, put down with what was decided about it."""

from dataclasses import replace

from orchestrator.contract.check_results import BEFORE_HOOK
from orchestrator.diagnosis.logs.readings import EARLY
from orchestrator.host_strikes import HOOK
from orchestrator.job.failures.diagnose import diagnose
from orchestrator.job.failures.drill_attribution import rehearsed
from orchestrator.job.failures.exit_classification import Verdict
from orchestrator.job.findings import Findings
from orchestrator.job.hosts.host_pool import addresses, switches_of
from orchestrator.job.incident import NOBODY, PREFLIGHT, Culprit, Evidence, Incident
from orchestrator.job.policy import Decision, trouble_of, ways_to_go_on
from orchestrator.job.stage import Running
from orchestrator.job.state import Run, with_incident

MOST_NAMED = 8
"""Ranks that an incident names."""


def first_cause(run: Run, findings: Findings) -> Verdict:
    """With all that the job knows of its hosts, and of its drills."""
    own = run.job.failure_classes if run.job else ()
    verdict = diagnose(findings, own, addresses(run), switches_of(run))
    if verdict.kind == EARLY:
        verdict = _of_how_many(run, findings, verdict)
    return replace(verdict, drill=rehearsed(run, findings, verdict.culprit, verdict.phase))


def _of_how_many(run: Run, findings: Findings, verdict: Verdict) -> Verdict:
    """With the number of steps that there were to do, and who else ended like that: where several
    did at once, who is the first is chance."""
    assert run.job is not None
    early = [exited for exited in findings.exits if exited.exit_code == 0 and not exited.stopped]
    others = [f"rank {exited.rank} after step {exited.step}" for exited in early[:MOST_NAMED]]
    note = f"exit code 0 before the last step, of {len(early)} ranks: {', '.join(others)}"
    return replace(
        verdict,
        cause=f"{verdict.cause} of {run.job.steps}",
        culprit=verdict.culprit if len(early) == 1 else NOBODY,
        evidence=replace(verdict.evidence, notes=(note, *verdict.evidence.notes)),
    )


def decided(run: Run, incident: Incident, decision: Decision) -> Incident:
    """With what was decided about it, and by which rule."""
    waits = f"; waits {decision.wait_s:.0f} s first" if decision.wait_s else ""
    return replace(
        incident,
        action=f"{incident.action}{waits}",
        remedy=decision.action,
        rule=decision.rule,
        edits=ways_to_go_on(run, incident, decision),
    )


def incident_of(run: Run, findings: Findings, verdict: Verdict, action: str) -> Incident:
    reported = [exited.step for exited in findings.exits]
    reported += [findings.hang.step] if findings.hang else []
    trouble = trouble_of(verdict)
    return Incident(
        id=len(run.history.incidents) + 1,
        attempt=run.attempt.number,
        at=verdict.at,
        kind=verdict.kind,
        cause=verdict.cause,
        culprit=verdict.culprit,
        evidence=verdict.evidence,
        action=action,
        step=max([run.attempt.step, *reported]),
        saved=None if findings.idle else run.progress.saved,
        signature=verdict.signature,
        detected_after_s=verdict.detected_after_s,
        confidence=verdict.confidence,
        drill=verdict.drill,
        failure=trouble.name,
        scope=trouble.scope,
        phase=verdict.phase,
        advice=verdict.fix or (verdict.failure.advice if verdict.failure else ""),
    )


def left_out(run: Run, at: float, host: str, why: str, *, cause: str = "", advice: str = "") -> Run:
    """With the incident of a host that was found wanting before ranks started on it.

    Args:
        cause: where it was not the check that found it.
    """
    by_hook = why.startswith(f"{BEFORE_HOOK}: ")
    incident = Incident(
        id=len(run.history.incidents) + 1,
        attempt=run.attempt.number,
        at=at,
        kind=PREFLIGHT,
        cause=cause or f"{host} failed the check before the start: {why}",
        culprit=Culprit(host=host),
        evidence=Evidence(notes=(why,)),
        action=f"{host} is left out",
        failure=HOOK if by_hook else "preflight",
        scope="host",
        remedy="replace",
        rule="preflight",
        step=run.attempt.step,
        detected_after_s=0.0,
        recovered_after_s=0.0 if isinstance(run.stage, Running) else None,
        advice=advice,
    )
    return with_incident(run, incident)

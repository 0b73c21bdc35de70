"""Builds the record of an incident from the findings of an attempt, and says whether a drill caused
it."""

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from ndctl.rank.phases import Phase
from orchestrator.contract.check_results import BEFORE_HOOK
from orchestrator.contract.drills import Drill
from orchestrator.diagnosis.cause.diagnose import diagnose
from orchestrator.diagnosis.cause.exits import (
    CONNECTION_LOST,
    EARLY,
    ENDED_FIRST,
    after_step,
    class_notes,
)
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.host_verdicts import HOST_LOST, named
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit, Evidence, Verdict
from orchestrator.diagnosis.classes import FailureSigns, classify, reading_of
from orchestrator.host_strikes import HOOK
from orchestrator.job.failures.policy import Decision, classified, ways_to_go_on
from orchestrator.job.failures.slow_program import longer_limit, slow_or_stuck
from orchestrator.job.hosts.acquittal import without_blame
from orchestrator.job.hosts.preemption import taken_by_scheduler
from orchestrator.job.incident import PREFLIGHT, Incident
from orchestrator.job.stage import Running
from orchestrator.job.state import Run, switches_of, with_incident

MOST_NAMED = 8
"""Ranks that an incident names."""
SOON = 10
"""Steps after a drill in which its failure is seen: ranks read their data ahead."""


def first_cause(run: Run, findings: Findings) -> Verdict:
    """The verdict on `findings`, with what the job knows of its hosts and its drills."""
    own = run.job.failure_classes if run.job else ()
    verdict = diagnose(findings, own, _addresses(run), switches_of(run))
    if verdict.kind in (EARLY, ENDED_FIRST):
        verdict = _with_early_exits(run, findings, verdict)
    elif verdict.kind == CONNECTION_LOST:
        verdict = _with_finished_hosts(run, findings, verdict)
    drill = _drill_of(run, findings, verdict.culprit, verdict.phase)
    verdict = replace(verdict, drill=drill)
    # A host that the scheduler took is no incident at all, so there is no blame to take away.
    if verdict.kind != HOST_LOST or taken_by_scheduler(findings, verdict):
        return verdict
    return without_blame(run, verdict)


def _addresses(run: Run) -> Mapping[str, str]:
    """Address -> its host, without addresses that several hosts share, as on one machine."""
    known = [(host.address, host.name) for host in run.hosts.by_name.values() if host.address]
    many = Counter(address for address, _ in known)
    return {address: name for address, name in known if many[address] == 1}


def _with_early_exits(run: Run, findings: Findings, verdict: Verdict) -> Verdict:
    """Adds the number of steps of the job, and all ranks that exited early. If several did, the
    order in which they were seen is chance, so there is no culprit."""
    assert run.job is not None
    of = f" of {run.job.steps}" if run.job.steps else ""  # unknown for a program of the user
    early = [exited for exited in findings.exits if exited.exit_code == 0 and not exited.stopped]
    others = [f"rank {exited.rank} {after_step(exited.step)}" for exited in early[:MOST_NAMED]]
    before = "before the last step" if run.job.steps else "before the others"
    note = f"exit code 0 {before}, of {len(early)} ranks: {', '.join(others)}"
    alone = len(early) == 1
    return replace(
        verdict,
        cause=f"{verdict.cause}{of}",
        culprit=verdict.culprit if alone else NOBODY,
        evidence=replace(
            verdict.evidence,
            notes=(note, *verdict.evidence.notes),
            ended=None if alone else verdict.culprit,
        ),
    )


def _with_finished_hosts(run: Run, findings: Findings, verdict: Verdict) -> Verdict:
    """Ranks lost their connections because all ranks of another host had returned 0. Their agent
    reports no exits: it does not know that other ranks went on."""
    assert run.job is not None
    finished = [host for host in run.attempt.placement if run.attempt.done.get(host)]
    if run.job.steps or not finished:
        return verdict
    cause = f"all ranks of {named(finished)} ended with exit code 0 before the others"
    found = reading_of(classify(FailureSigns(kind=ENDED_FIRST)))
    first = run.attempt.placement.index(finished[0]) * run.plan.ranks_per_host
    evidence = replace(
        verdict.evidence,
        notes=(*verdict.evidence.notes, *class_notes(found)),
        ended=Culprit(host=finished[0], rank=first),
    )
    return replace(
        verdict,
        kind=ENDED_FIRST,
        cause=cause,
        failure=found,
        evidence=evidence,
        # A program whose ranks end at the same step again has a bug.
        signature=f"{cause} {after_step(_last_own_step(run, findings))}",
    )


def decided(run: Run, incident: Incident, decision: Decision) -> Incident:
    """The incident with the decision about it."""
    waits = f"; waits {decision.wait_s:.0f} s first" if decision.wait_s else ""
    return replace(
        incident,
        action=f"{incident.action}{waits}",
        remedy=decision.action,
        rule=decision.rule,
        edits=ways_to_go_on(run, incident, decision),
    )


def _last_own_step(run: Run, findings: Findings) -> int:
    """The last step that ranks of the present attempt are known to have done."""
    reported = [exited.step for exited in findings.exits]
    reported += [findings.hang.step] if findings.hang else []
    return max([run.attempt.own_step, *reported])


def incident_of(run: Run, findings: Findings, verdict: Verdict, action: str) -> Incident:
    found = classified(verdict)
    advice = verdict.fix or (verdict.failure.advice if verdict.failure else "")
    option = longer_limit(run, findings, verdict) if findings.hang else ""
    return Incident(
        id=len(run.history.incidents) + 1,
        attempt=run.attempt.number,
        at=verdict.at,
        kind=verdict.kind,
        cause=verdict.cause,
        culprit=verdict.culprit,
        evidence=verdict.evidence,
        action=action,
        step=_last_own_step(run, findings),
        saved=None if findings.idle else _newest(run),
        signature=verdict.signature,
        detected_after_s=verdict.detected_after_s,
        confidence=verdict.confidence,
        drill=verdict.drill,
        failure=found.name,
        scope=found.scope,
        phase=verdict.phase,
        advice=slow_or_stuck(option, advice) if option else advice,
        edits=(option,) if option else (),
    )


def _newest(run: Run) -> int | None:
    """Step of the newest checkpoint. A user's program may resume from a file that ndctl does not
    know, so that nothing is known of lost steps until it says where it resumed."""
    return None if run.is_own and not run.progress.saved else run.progress.saved


def with_incident_before_cancel(run: Run) -> Run:
    """Adds the incident of a failure before the job was cancelled, unless the scheduler had taken
    the host."""
    found = run.interruption.findings
    if found is None or not found.before_cancel:
        return run
    verdict = first_cause(run, found)
    if taken_by_scheduler(found, verdict):
        return run
    incident = incident_of(run, found, verdict, f"cancelled by {run.interruption.cancelled_by}")
    return with_incident(run, incident)


def left_out(run: Run, at: float, host: str, why: str, *, cause: str = "", advice: str = "") -> Run:
    """Adds the incident of a host that is excluded before ranks start on it.

    Args:
        why: why the host is excluded.
        cause: replaces the text of a failed check.
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
        action=f"{host} is excluded",
        failure=HOOK if by_hook else "preflight",
        scope="host",
        remedy="replace",
        rule="preflight",
        step=run.attempt.own_step,
        detected_after_s=0.0,
        recovered_after_s=0.0 if isinstance(run.stage, Running) else None,
        advice=advice,
    )
    return with_incident(run, incident)


# Drills


def _drill_of(run: Run, findings: Findings, culprit: Culprit, phase: Phase | None) -> str | None:
    """The drill of the present attempt that caused the incident."""
    if not run.attempt.drills:
        return None
    step = _first_sign(run, findings)
    for drill, host in _happened(run):
        own_rank = drill.target == "rank" and culprit.rank == drill.index
        hit = culprit == NOBODY or culprit.host == host or own_rank
        # A file that cannot be written is noticed at the next checkpoint, however late that is.
        saving = drill.fault == "write" and phase == "checkpoint"
        if hit and (saving or step - drill.step <= SOON):
            return str(drill)
    return None


def drilled(run: Run, host: str) -> bool:
    """A drill of the present attempt happened on the host, however long ago: some drills last."""
    return any(where == host for _, where in _happened(run))


def drill_on(run: Run, host: str, fault: str) -> str | None:
    """The drill with this fault that happened on the host in the present attempt."""
    return next(
        (str(one) for one, where in _happened(run) if (where, one.fault) == (host, fault)), None
    )


def _happened(run: Run) -> Iterator[tuple[Drill, str | None]]:
    """The drills of the present attempt, each with its host."""
    assert run.job is not None
    for drill in run.job.drills:
        if drill.id in run.attempt.drills:
            each = run.plan.ranks_per_host if drill.target == "rank" else 1
            number = drill.index // each
            placement = run.attempt.placement
            yield drill, placement[number] if number < len(placement) else None


def _first_sign(run: Run, findings: Findings) -> int:
    """The step of the first sign. If the loss was not finite for a while, the first such step."""
    since = [x.error.since for x in findings.exits if x.error and x.error.since is not None]
    seen = [exited.step for exited in findings.exits]
    seen += [findings.hang.step] if findings.hang else []
    return min(since) if since else max([run.attempt.own_step, *seen])

"""From a hang to its verdict: evidence is gathered from all hosts, then the ranks are stopped while
the leader has the evidence judged beside its decisions. What comes of that is an event, so a fold
of the journal costs nothing however many ranks there are. Ranks that move again before they are
stopped were not stuck: the attempt goes on. Pure.
"""

from dataclasses import replace

from orchestrator.contract.messages.actions import GatherEvidence
from orchestrator.contract.messages.events import (
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HangOver,
    RankExited,
)
from orchestrator.job.failures.collective_mismatch import judge_who_differed
from orchestrator.job.failures.diagnose import Weight, timed_out, weigh
from orchestrator.job.findings import Findings
from orchestrator.job.stage import Stage
from orchestrator.job.stage_transitions import FAILED_GRACE_S, Result, all_done, conclude, stop
from orchestrator.job.state import Run

EVIDENCE_S = 5.0
"""What agents may take to gather it; the supervisor waits a little longer."""


def hang_detected(run: Run, event: HangDetected) -> Result:
    if run.stage not in (Stage.STARTING, Stage.RUNNING):
        return run, ()
    reason = f"no progress for {event.stalled_s:.1f} s in phase {event.phase}"
    return _diagnosing(run, event.at, reason, Findings(opened_at=event.at, hang=event))


def watchdog_spoke(run: Run, event: RankExited) -> bool:
    """Whether a rank ended because a collective took too long: that is a hang, seen by the rank
    itself, and its peers still have the evidence of who it waited for."""
    known = run.findings.exits if run.findings else ()
    return (
        run.stage in (Stage.STARTING, Stage.RUNNING)
        and not event.stopped
        and timed_out(event)
        and all(_follows(exited) for exited in known)
        and not (run.findings and run.findings.lost)
    )


def diagnose_watchdog(run: Run, event: RankExited, at: float) -> Result:
    """`run` has the exit among its findings."""
    assert run.findings is not None
    reason = f"a collective of rank {event.rank} on {event.host} did not return in time"
    return _diagnosing(run, at, reason, run.findings)


def goes_on_diagnosing(run: Run, event: RankExited) -> bool:
    """Peers that are aborted one after the other do not end the look at why."""
    return (
        run.stage is Stage.DIAGNOSING
        and run.findings is not None
        and run.findings.hang is None
        and _follows(event)
    )


def _follows(exited: RankExited) -> bool:
    """Whether the end may follow from the hang. A watchdog's words do also where the user has a
    class for them that is no symptom."""
    return weigh(exited) is Weight.SYMPTOM or timed_out(exited)


def _diagnosing(run: Run, at: float, reason: str, findings: Findings) -> Result:
    findings = replace(findings, within=run.stage)
    after = replace(
        run,
        stage=Stage.DIAGNOSING,
        since=at,
        deadline=at + 2 * EVIDENCE_S,
        reason=reason,
        findings=findings,
    )
    return after, (GatherEvidence(attempt=run.attempt, timeout_s=EVIDENCE_S, reason=reason),)


def hang_over(run: Run, event: HangOver) -> Result:
    """Go on as if nothing had been: it spends no restart, and nobody is blamed."""
    found = run.findings
    if run.stage is not Stage.DIAGNOSING or found is None or found.hang is None:
        return run, ()
    if found.exits or found.lost or found.stopped:
        return run, ()
    reason = f"attempt {run.attempt} goes on: rank {event.rank} moves again"
    after = replace(
        run, stage=found.within, since=event.at, deadline=None, reason=reason, findings=None
    )
    return after, ()


def evidence_gathered(run: Run, event: EvidenceGathered) -> Result:
    if run.findings is None or run.stage not in (Stage.DIAGNOSING, Stage.STOPPING):
        return run, ()
    evidence = (*run.findings.evidence, event)
    run = replace(run, findings=replace(run.findings, evidence=evidence))
    came = {part.host for part in evidence if not part.unasked}
    if event.unasked or not set(run.placement) <= came:
        return run, ()
    if run.stage is Stage.STOPPING:
        return judge_who_differed(run, event.at)
    return stop(run, event.at, run.reason, FAILED_GRACE_S)


def hang_judged(run: Run, event: HangJudged) -> Result:
    if run.findings is None or run.stage not in (Stage.DIAGNOSING, Stage.STOPPING):
        return run, ()
    run = replace(run, findings=replace(run.findings, judged=event))
    if run.stage is Stage.STOPPING and all_done(run):
        return conclude(run, event.at)
    return run, ()

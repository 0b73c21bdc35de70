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
from orchestrator.job.stage import Diagnosing, Running, Stage, Starting, Stopping
from orchestrator.job.stage_transitions import FAILED_GRACE_S, Result, all_done, conclude, stop
from orchestrator.job.state import Run, with_findings

EVIDENCE_S = 5.0
"""What agents may take to gather it; the supervisor waits a little longer."""


def hang_detected(run: Run, event: HangDetected) -> Result:
    if not isinstance(run.stage, Starting | Running):
        return run, ()
    reason = f"no progress for {event.stalled_s:.1f} s in phase {event.phase}"
    return _diagnosing(run, event.at, reason, Findings(opened_at=event.at, hang=event))


def watchdog_spoke(run: Run, event: RankExited) -> bool:
    """Whether a rank ended because a collective took too long: that is a hang, seen by the rank
    itself, and its peers still have the evidence of who it waited for."""
    known = run.interruption.findings.exits if run.interruption.findings else ()
    return (
        isinstance(run.stage, Starting | Running)
        and not event.stopped
        and timed_out(event)
        and all(_follows(exited) for exited in known)
        and not (run.interruption.findings and run.interruption.findings.lost)
    )


def diagnose_watchdog(run: Run, event: RankExited, at: float) -> Result:
    """`run` has the exit among its findings."""
    assert run.interruption.findings is not None
    reason = f"a collective of rank {event.rank} on {event.host} did not return in time"
    return _diagnosing(run, at, reason, run.interruption.findings)


def goes_on_diagnosing(run: Run, event: RankExited) -> bool:
    """Peers that are aborted one after the other do not end the look at why."""
    return (
        isinstance(run.stage, Diagnosing)
        and run.interruption.findings is not None
        and run.interruption.findings.hang is None
        and _follows(event)
    )


def _follows(exited: RankExited) -> bool:
    """Whether the end may follow from the hang. A watchdog's words do also where the user has a
    class for them that is no symptom."""
    return weigh(exited) is Weight.SYMPTOM or timed_out(exited)


def _diagnosing(run: Run, at: float, reason: str, findings: Findings) -> Result:
    trained, deadline = isinstance(run.stage, Running), at + 2 * EVIDENCE_S
    stage = Diagnosing(since=at, reason=reason, deadline=deadline, trained=trained)
    after = with_findings(replace(run, stage=stage), findings)
    return after, (GatherEvidence(attempt=run.attempt.number, timeout_s=EVIDENCE_S, reason=reason),)


def hang_over(run: Run, event: HangOver) -> Result:
    """Go on as if nothing had been: it spends no restart, and nobody is blamed."""
    found = run.interruption.findings
    if not isinstance(run.stage, Diagnosing) or found is None or found.hang is None:
        return run, ()
    if found.exits or found.lost or found.stopped:
        return run, ()
    reason = f"attempt {run.attempt.number} goes on: rank {event.rank} moves again"
    stage: Stage = Starting(since=event.at, reason=reason)
    if run.stage.trained:
        stage = Running(since=event.at, reason=reason)
    return with_findings(replace(run, stage=stage), None), ()


def evidence_gathered(run: Run, event: EvidenceGathered) -> Result:
    if run.interruption.findings is None or not isinstance(run.stage, Diagnosing | Stopping):
        return run, ()
    evidence = (*run.interruption.findings.evidence, event)
    run = with_findings(run, replace(run.interruption.findings, evidence=evidence))
    came = {part.host for part in evidence if not part.unasked}
    if event.unasked or not set(run.attempt.placement) <= came:
        return run, ()
    if isinstance(run.stage, Stopping):
        return judge_who_differed(run, event.at)
    return stop(run, event.at, run.stage.reason, FAILED_GRACE_S)


def hang_judged(run: Run, event: HangJudged) -> Result:
    if run.interruption.findings is None or not isinstance(run.stage, Diagnosing | Stopping):
        return run, ()
    run = with_findings(run, replace(run.interruption.findings, judged=event))
    if isinstance(run.stage, Stopping) and all_done(run):
        return conclude(run, event.at)
    return run, ()

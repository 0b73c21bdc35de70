"""A hang: agents gather evidence, then the ranks are stopped while the leader analyses it.

The result of the analysis is an event, so a fold of the journal costs nothing, however many ranks
there are. Ranks that make progress before they are stopped were not stuck: the attempt continues.
"""

from msgspec.structs import replace

from orchestrator.contract.messages.actions import JudgeHang
from orchestrator.contract.messages.events import (
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HangOver,
)
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.job.attempt_end import (
    JUDGE_S,
    all_done,
    conclude,
    gather_evidence,
    stop_failed,
)
from orchestrator.job.leave import Result
from orchestrator.job.stage import Diagnosing, Running, Stage, Starting, Stopping
from orchestrator.job.state import Run, with_deadline, with_findings


def hang_detected(run: Run, event: HangDetected) -> Result:
    reason = f"no progress for {event.stalled_s:.1f} s in phase {event.phase}"
    return gather_evidence(run, event.at, reason, Findings(opened_at=event.at, hang=event))


def hang_over(run: Run, event: HangOver) -> Result:
    """Ranks make progress again: continue the attempt. It costs no restart and has no culprit."""
    found = run.interruption.findings
    assert isinstance(run.stage, Diagnosing)
    if found is None or found.hang is None or found.exits or found.lost or found.stopped:
        return run, ()
    reason = f"attempt {run.attempt.number} continues: rank {event.rank} makes progress again"
    stage: Stage = Starting(since=event.at, reason=reason)
    if run.stage.trained:
        stage = Running(since=event.at, reason=reason)
    return with_findings(replace(run, stage=stage), None), ()


def evidence_gathered(run: Run, event: EvidenceGathered) -> Result:
    found = run.interruption.findings
    if found is None:
        return run, ()
    evidence = (*found.evidence, event)
    run = with_findings(run, replace(found, evidence=evidence))
    came = {part.host for part in evidence if not part.unasked}
    if event.unasked or not set(run.attempt.placement) <= came:
        return run, ()
    if isinstance(run.stage, Stopping):
        return _analyse_mismatch(run, event.at)
    return stop_failed(run, event.at, run.stage.reason)


def _analyse_mismatch(run: Run, at: float) -> Result:
    """All hosts have reported what their ranks had called, after the last rank exited."""
    found = run.interruption.findings
    if found is None or not found.asked_after or found.judged:
        return run, ()
    until = at + JUDGE_S
    reason = "all hosts have reported what their ranks had called"
    after = with_deadline(with_findings(run, replace(found, judge_by=until)), until)
    return after, (JudgeHang(attempt=run.attempt.number, reason=reason),)


def hang_judged(run: Run, event: HangJudged) -> Result:
    found = run.interruption.findings
    if found is None:
        return run, ()
    run = with_findings(run, replace(found, judged=event))
    if isinstance(run.stage, Stopping) and all_done(run):
        return conclude(run, event.at)
    return run, ()

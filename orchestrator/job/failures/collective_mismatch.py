"""Operations that do not fit each other, where ranks end over it as on gloo instead of hanging.

A rank that is sent more than it expects is ended by gloo, so which one ends says nothing: it may
have called too little, or a peer too much. What the others had called tells, which they write down
on their way out; so after the last has ended agents are asked for that, and it is judged as the
evidence of a hang is. Pure.
"""

from dataclasses import replace

from orchestrator.contract.messages.actions import Action, GatherEvidence, JudgeHang
from orchestrator.contract.messages.events import RankExited
from orchestrator.diagnosis.hang.evidence_index import SURE
from orchestrator.diagnosis.hang.post_mortem import CLASS
from orchestrator.diagnosis.hang.report import ranks_words
from orchestrator.job.failures.exit_classification import Verdict, failure_of
from orchestrator.job.findings import Findings
from orchestrator.job.incident import Culprit
from orchestrator.job.state import Run, with_deadline, with_findings

ASK_S = 10.0
"""For the evidence of all hosts, small files that are there already …"""
JUDGE_S = 30.0
"""… and for what it amounts to."""
UNKNOWN = "whose it was that did not fit is not known"


def is_unfit(exited: RankExited) -> bool:
    """Whether a rank ended because what ranks called did not fit."""
    found = failure_of(exited)
    return not exited.stopped and found is not None and found.name == CLASS


def ended_over_it(findings: Findings) -> frozenset[int]:
    return frozenset(exited.rank for exited in findings.exits if is_unfit(exited))


def asks_who_differed(findings: Findings) -> bool:
    asked = findings.judged or findings.judge_by is not None or findings.asked_after
    return not asked and bool(ended_over_it(findings))


def ask_who_differed(run: Run, findings: Findings, at: float) -> tuple[Run, tuple[Action, ...]]:
    """Before the attempt is concluded. Evidence that does not come is not waited for."""
    until = at + ASK_S
    asking = GatherEvidence(
        attempt=run.attempt.number,
        timeout_s=ASK_S,
        reason="operations of ranks did not fit each other: what had they called?",
        ended=True,
    )
    findings = replace(findings, asked_after=True, judge_by=until)
    return with_deadline(with_findings(run, findings), until), (asking,)


def judge_who_differed(run: Run, at: float) -> tuple[Run, tuple[Action, ...]]:
    """All hosts have told what their ranks had called, where they were asked for that."""
    if (
        run.interruption.findings is None
        or not run.interruption.findings.asked_after
        or run.interruption.findings.judged
    ):
        return run, ()
    until = at + JUDGE_S
    reason = "all hosts have told what their ranks had called"
    findings = replace(run.interruption.findings, judge_by=until)
    after = with_deadline(with_findings(run, findings), until)
    return after, (JudgeHang(attempt=run.attempt.number, reason=reason),)


def with_who_differed(verdict: Verdict, exited: RankExited, findings: Findings) -> Verdict:
    """No host is to blame for what a program calls, and a rank only where that is sure."""
    judged, cause = findings.judged, f"operations of ranks did not fit each other ({verdict.cause})"
    if judged is None:
        return replace(verdict, culprit=Culprit(), cause=f"{cause}; {UNKNOWN}", signature="")
    sure = judged.scope == "user" and judged.confidence >= SURE and bool(judged.ranks)
    known = f"{judged.verdict} ({judged.confidence:.0%} sure): {judged.cause}"
    notes = (*verdict.evidence.notes, *judged.signs)
    signature = f"mismatch of {ranks_words(judged.ranks)} at step {exited.step}"
    return replace(
        verdict,
        culprit=Culprit(rank=judged.ranks[0] if sure else None),
        cause=f"{cause}; {known}" if judged.ranks else f"{cause}; {UNKNOWN}: {judged.cause}",
        evidence=replace(verdict.evidence, notes=notes),
        signature=signature if sure else "",
        confidence=judged.confidence,
    )

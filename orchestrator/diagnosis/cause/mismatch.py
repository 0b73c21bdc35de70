"""Collectives that do not match, on backends such as gloo where ranks exit over it.

gloo aborts the rank that receives more bytes than it expects. So the rank that exits may have
called too little, or its peer too much: the exit alone names no culprit. The other ranks write down
what they had called as they exit. After the last exit the agents are asked for that, and it is
analysed like the evidence of a hang.
"""

from msgspec.structs import replace

from orchestrator.contract.messages.events import RankExited
from orchestrator.diagnosis.cause.exits import is_mismatch
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import Culprit, Verdict
from orchestrator.diagnosis.hang.evidence_index import SURE
from orchestrator.diagnosis.hang.report import ranks_words

UNKNOWN = "the rank that called the wrong one is not known"


def mismatched(findings: Findings) -> frozenset[int]:
    """Ranks that were aborted over it."""
    return frozenset(exited.rank for exited in findings.exits if is_mismatch(exited))


def mismatch_verdict(verdict: Verdict, exited: RankExited, findings: Findings) -> Verdict:
    """`verdict` of `exited` with the result of the analysis. It blames no host, because the program
    decides what a rank calls, and it blames a rank only if the analysis is sure."""
    judged, cause = findings.judged, f"collectives of ranks did not match ({verdict.cause})"
    if judged is None:
        return replace(verdict, culprit=Culprit(), cause=f"{cause}; {UNKNOWN}", signature="")
    # Another scope means that the analysis found a stuck or missing rank, not a wrong call.
    sure = judged.scope == "user" and judged.confidence >= SURE and bool(judged.ranks)
    known = f"{judged.verdict} ({judged.confidence:.0%} sure): {judged.cause}"
    notes = (*verdict.evidence.notes, *judged.signs)
    signature = f"mismatch of {ranks_words(judged.ranks)} at step {exited.step}"
    return replace(
        verdict,
        culprit=Culprit(rank=judged.ranks[0] if sure else None),
        cause=f"{cause}; {known}" if judged.ranks else f"{cause}; {UNKNOWN}: {judged.cause}",
        evidence=replace(verdict.evidence, notes=notes),
        # Without a sure rank two failures may have different causes. An equal signature would end
        # the job as a repeated error of the program.
        signature=signature if sure else "",
        confidence=judged.confidence,
    )

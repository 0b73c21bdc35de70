"""The verdict on a hang: what was judged of it, and what the hosts say of themselves."""

from collections.abc import Iterator

from orchestrator.contract.events import HangJudged
from orchestrator.contract.failures import FailureRule
from orchestrator.diagnosis.case import SURE
from orchestrator.diagnosis.classes import Classified
from orchestrator.diagnosis.words import ranks_words
from orchestrator.supervise.judgement import judged_from
from orchestrator.supervise.state import Culprit, Evidence, Findings
from orchestrator.supervise.verdict import Verdict, broken_hosts, class_notes, failure_of

MOST_HOSTS = 16
"""Whose probes an incident shows."""


def hang_verdict(findings: Findings, own: tuple[FailureRule, ...]) -> Verdict:
    """Only a verdict that is sure blames a host, and where the program is to blame, none.

    Where it is not, the one host whose kernel tells of broken hardware is blamed. Where a watchdog
    spoke first, the failure is of the class of what it said.
    """
    attempt = findings.hang.attempt if findings.hang else findings.exits[0].attempt
    judged = findings.judged or judged_from(findings, attempt)
    seen, at, detected_after_s = _hang_seen(findings)
    sure = bool(judged.hosts) or (judged.scope == "user" and judged.confidence >= SURE)
    rank = judged.ranks[0] if sure and judged.ranks else None
    culprit = Culprit(host=judged.hosts[0] if judged.hosts else None, rank=rank)
    broken = broken_hosts(findings, own)
    found, doubt = None if findings.hang else failure_of(findings.exits[0], own), ""
    if sure:
        found = broken.get(culprit.host or "", found)
    elif alone := _broken_alone(broken):
        culprit, found = Culprit(host=alone), broken[alone]
        doubt = f", but {alone} has broken hardware ({found.rule.name})"
    elif judged.ranks:
        doubt = ", but that is not sure enough to blame it"
    notes = (
        *judged.signs,
        *(f"waiting: {words}" for words in judged.waiting),
        *(f"the kernel of {host}: {one.line}" for host, one in broken.items()),
        *_probes(findings),
        *class_notes(found),
    )
    return Verdict(
        kind="hang",
        cause=f"{seen}; {judged.verdict} ({judged.confidence:.0%} sure): {judged.cause}{doubt}",
        culprit=culprit,
        at=at,
        detected_after_s=detected_after_s,
        phase=findings.hang.phase if findings.hang else findings.exits[0].phase,
        evidence=Evidence(stacks=judged.stacks, notes=notes),
        signature=_desync(findings, judged) if sure and judged.scope == "user" else "",
        confidence=judged.confidence,
        failure=found.rule if found else None,
    )


def _broken_alone(broken: dict[str, Classified]) -> str | None:
    """The one host that cannot be used as it is."""
    hosts = [host for host, one in broken.items() if one.rule.action == "replace"]
    return hosts[0] if len(hosts) == 1 else None


def _hang_seen(findings: Findings) -> tuple[str, float, float]:
    """How the hang was noticed, since when it stood still, and how long that took."""
    hang = findings.hang
    if hang is None:
        first = min(findings.exits, key=lambda exited: exited.at)
        return f"a collective of rank {first.rank} timed out", first.at, first.detected_after_s
    words = f"no rank made progress for {hang.stalled_s:.1f} s in phase {hang.phase}"
    since = hang.at - hang.stalled_s
    return f"{words} (limit {hang.limit_s:.1f} s)", since, hang.stalled_s


def _desync(findings: Findings, judged: HangJudged) -> str:
    """Two such hangs of the same ranks at the same step are the program's own."""
    step = findings.hang.step if findings.hang else findings.exits[0].step
    return f"{judged.verdict} of {ranks_words(judged.ranks)} at step {step}"


def _probes(findings: Findings) -> Iterator[str]:
    """What hosts found on themselves meanwhile."""
    for part in findings.evidence[:MOST_HOSTS]:
        for finding in part.findings:
            yield f"{part.host} {finding.verdict}: {finding.what}: {finding.found}"

"""The verdict on a hang: what was judged of it, and what the hosts say of themselves."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.contract.messages.events import HangDetected, HangJudged, RankExited
from orchestrator.contract.spec.failures import Reading
from orchestrator.diagnosis.hang.evidence_index import SURE
from orchestrator.diagnosis.hang.report import ranks_words
from orchestrator.job.failures.exit_classification import (
    Verdict,
    broken_hosts,
    class_notes,
    failure_of,
)
from orchestrator.job.failures.hang_event import judged_from
from orchestrator.job.findings import Findings
from orchestrator.job.incident import Culprit, Evidence

MOST_HOSTS = 16
"""Whose probes an incident shows."""
MOST_CHARACTERS = 300
"""Of a watchdog's words."""
WAITED = re.compile(r"(?:ran for|timeout\(ms\)=|timed out waiting) {0,4}(\d{1,12})", re.IGNORECASE)
"""How long a collective did not return, as NCCL's watchdog and gloo tell it."""


def hang_verdict(findings: Findings) -> Verdict:
    """Only a verdict that is sure blames a host, and where the program is to blame, none.

    Where it is not, the one host whose kernel tells of broken hardware is blamed, and where a
    watchdog spoke first, the failure is of the class of what it said. Who saw a hang whose cause is
    known, ndctl or a watchdog, makes no difference to what is done.
    """
    attempt = findings.hang.attempt if findings.hang else findings.exits[0].attempt
    judged = findings.judged or judged_from(findings, attempt)
    seen = _hang_seen(findings)
    sure = bool(judged.hosts) or (judged.scope == "user" and judged.confidence >= SURE)
    rank = judged.ranks[0] if sure and judged.ranks else None
    culprit = Culprit(host=judged.hosts[0] if judged.hosts else None, rank=rank)
    broken = broken_hosts(findings)
    found, doubt = None if findings.hang else failure_of(findings.exits[0]), ""
    if sure:
        told = found if found and found.own else None  # the user's own class stays
        found = broken.get(culprit.host or "", told)
    elif alone := _broken_alone(broken):
        culprit, found = Culprit(host=alone), broken[alone]
        doubt = f", but {alone} has broken hardware ({found.name})"
    elif judged.ranks:
        doubt = ", but that is not sure enough to blame it"
    notes = (
        *seen.notes,
        *judged.signs,
        *(f"waiting: {words}" for words in judged.waiting),
        *(f"the kernel of {host}: {one.line}" for host, one in broken.items()),
        *_probes(findings),
        *class_notes(found),
    )
    known = f"{judged.verdict} ({judged.confidence:.0%} sure): {judged.cause}{doubt}"
    return Verdict(
        kind="hang",
        cause=f"{seen.words}; {known}",
        culprit=culprit,
        at=seen.at,
        detected_after_s=seen.detected_after_s,
        phase=seen.by.phase,
        evidence=Evidence(stacks=judged.stacks, notes=notes),
        signature=_desync(seen.by.step, judged) if sure and judged.scope == "user" else "",
        confidence=judged.confidence,
        failure=found,
    )


def _broken_alone(broken: dict[str, Reading]) -> str | None:
    """The one host that cannot be used as it is."""
    hosts = [host for host, one in broken.items() if one.action == "replace"]
    return hosts[0] if len(hosts) == 1 else None


class _Seen(NamedTuple):
    by: HangDetected | RankExited
    """Ndctl, or a rank that a watchdog ended."""
    words: str
    at: float
    """Since when it stood still."""
    detected_after_s: float
    notes: tuple[str, ...] = ()


def _hang_seen(findings: Findings) -> _Seen:
    """How the hang was noticed, since when it stood still, and how long that took."""
    hang = findings.hang
    if hang is not None:
        words = f"no rank made progress for {hang.stalled_s:.1f} s in phase {hang.phase}"
        words = f"{words} (limit {hang.limit_s:.1f} s)"
        return _Seen(hang, words, hang.at - hang.stalled_s, hang.stalled_s)
    exits = sorted(findings.exits, key=lambda exited: exited.at)
    for exited in exits:
        line, waited_s = _waited(exited)
        if waited_s:
            words = f"a collective of rank {exited.rank} timed out after {waited_s:.0f} s"
            notes = (f"rank {exited.rank} said: {line}",)
            since, after_s = exited.at - waited_s, exited.detected_after_s + waited_s
            return _Seen(exited, words, since, after_s, notes)
    first = exits[0]
    words = f"a collective of rank {first.rank} timed out"
    return _Seen(first, words, first.at, first.detected_after_s)


def _waited(exited: RankExited) -> tuple[str, float]:
    """The line in which a rank says how long its collective did not return, and how long."""
    said = exited.error.message.splitlines() if exited.error else exited.log_tail
    for line in said:
        if told := WAITED.findall(line):
            return line.strip()[:MOST_CHARACTERS], max(map(int, told)) / 1000
    return "", 0.0


def _desync(step: int, judged: HangJudged) -> str:
    """Two such hangs of the same ranks at the same step are the program's own."""
    return f"{judged.verdict} of {ranks_words(judged.ranks)} at step {step}"


def _probes(findings: Findings) -> Iterator[str]:
    """What hosts found on themselves meanwhile."""
    for part in findings.evidence[:MOST_HOSTS]:
        for finding in part.findings:
            yield f"{part.host} {finding.verdict}: {finding.what}: {finding.found}"

"""The verdict on a hang, from the analysis of its evidence and from what the hosts report."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.contract.messages.events import HangDetected, HangJudged, RankExited
from orchestrator.contract.spec.failures import Reading
from orchestrator.diagnosis.cause.exits import broken_hosts, class_notes, failure_of
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.hang_event import judged_from
from orchestrator.diagnosis.cause.verdict import Culprit, Evidence, Verdict
from orchestrator.diagnosis.hang.evidence_index import SURE
from orchestrator.diagnosis.hang.report import ranks_words

MOST_HOSTS = 16
"""Hosts whose probes an incident shows."""
MOST_CHARACTERS = 300
"""Characters of a watchdog's message."""
WAITED = re.compile(r"(?:ran for|timeout\(ms\)=|timed out waiting) {0,4}(\d{1,12})", re.IGNORECASE)
"""Milliseconds that a collective did not return, in the message of NCCL's watchdog or gloo."""


def hang_verdict(findings: Findings) -> Verdict:
    """A host is the culprit only if the analysis is sure, and never if the program is at fault.

    If the analysis is not sure, the culprit is the one host whose kernel reports broken hardware.
    If a watchdog ended a rank first, the failure has the class of the watchdog's message. A hang
    with a known cause is handled alike, whether ndctl or a watchdog noticed it.
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
        own = found if found and found.own else None  # the user's own class has priority
        found = broken.get(culprit.host or "", own)
    elif alone := _broken_alone(broken):
        culprit, found = Culprit(host=alone), broken[alone]
        doubt = f", but {alone} has broken hardware ({found.name})"
    elif judged.ranks:
        doubt = ", but that is not sure enough to name a culprit"
        if judged.confidence >= SURE:
            # Such as a rank without CPU, for which the limits of the job may be the cause.
            host = "its host is" if len(judged.ranks) == 1 else "a host is"
            doubt = f", but this does not show that {host} at fault, so no culprit is named"
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
        # It says more than the class does, which sends to the logs.
        fix=judged.advice if judged.verdict == "thread" else "",
    )


def _broken_alone(broken: dict[str, Reading]) -> str | None:
    """The host with broken hardware, if it is the only one."""
    hosts = [host for host, one in broken.items() if one.action == "replace"]
    return hosts[0] if len(hosts) == 1 else None


class _Seen(NamedTuple):
    by: HangDetected | RankExited
    """The detection by ndctl, or the exit of a rank that a watchdog ended."""
    words: str
    at: float
    """When progress stopped."""
    detected_after_s: float
    notes: tuple[str, ...] = ()


def _hang_seen(findings: Findings) -> _Seen:
    """How the hang was noticed, when progress stopped, and how long the detection took."""
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
    """The line in which a rank says how long its collective did not return, and the seconds."""
    said = exited.error.message.splitlines() if exited.error else exited.log_tail
    for line in said:
        if told := WAITED.findall(line):
            return line.strip()[:MOST_CHARACTERS], max(map(int, told)) / 1000
    return "", 0.0


def _desync(step: int, judged: HangJudged) -> str:
    """Two hangs of the same ranks at the same step are a bug of the program."""
    who = ranks_words(judged.ranks) if judged.ranks else "no rank"
    return f"{judged.verdict} of {who} at step {step}"


def _probes(findings: Findings) -> Iterator[str]:
    """What the probes of the hosts found."""
    for part in findings.evidence[:MOST_HOSTS]:
        for finding in part.findings:
            yield f"{part.host} {finding.verdict}: {finding.what}: {finding.found}"

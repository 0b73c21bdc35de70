"""What broke and who did it, from everything that was found out about one attempt.

Peers of a rank that died fail too, and often louder. So every sign is sorted by how well it can
stand for itself, those last that are what a peer's death looks like; among equals the earliest.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from orchestrator.contract import exits
from orchestrator.contract.events import AgentLost, HangJudged, RankExited
from orchestrator.contract.failures import FailureRule
from orchestrator.contract.phases import Phase
from orchestrator.diagnosis.case import SURE
from orchestrator.diagnosis.classes import Classified, Signs, classify
from orchestrator.diagnosis.words import ranks_words
from orchestrator.supervise.judgement import judged_from
from orchestrator.supervise.state import NOBODY, Culprit, Evidence, Findings

SYMPTOMS = re.compile(
    r"connection closed by (remote )?peer|connection reset by peer|connection refused|broken pipe"
    r"|gloo/transport|gloo::|connectfullmesh|enforce fail(?! at alloc_cpu)"
    r"|recvvalue failed|sendbytes failed"
    r"|application timeout caused pair closure|store timed out|socket timeout|wait timeout"
    r"|socket has timed out|timed out waiting|failed to connect|failed to recv"
    r"|nccl.*(remote|peer|watchdog|was aborted)|ncclremoteerror|watchdog caught collective",
    re.IGNORECASE,
)
"""What a rank says when a peer went away (PyTorch's gloo, NCCL and TCPStore)."""


TIMEOUTS = re.compile(
    r"watchdog caught collective|collective operation timeout|timed out waiting"
    r"|application timeout caused pair closure|wait timeout|timeout at .*watchdog",
    re.IGNORECASE,
)
"""What a rank says whose collective did not return in time: a hang, seen by the rank itself."""
MOST_HOSTS = 16
"""Whose probes an incident shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    kind: str
    cause: str
    culprit: Culprit
    at: float
    detected_after_s: float
    evidence: Evidence
    signature: str = ""
    final: bool = False
    """Trying again cannot help."""
    failure: FailureRule | None = None
    """The rule of the failure's class."""
    phase: Phase | None = None
    """In which it happened, where that is known."""
    confidence: float | None = None
    """Of what was weighed; None: it was seen."""


def diagnose(findings: Findings, own: tuple[FailureRule, ...] = ()) -> Verdict:
    """The first cause of an attempt's trouble; `unknown` is a verdict too, and blames nobody.

    `own`: the user's classes.
    """
    signs = sorted(_signs(findings, own), key=lambda sign: sign[:2])
    if not signs:
        return _classed(_launch_failed(findings), own)
    weight, _, verdict = signs[0]
    return _classed(_only_symptoms(verdict) if weight is Weight.SYMPTOM else verdict, own)


def _classed(verdict: Verdict, own: tuple[FailureRule, ...]) -> Verdict:
    """With its class: of what no log line tells, by how it was seen."""
    if verdict.failure is not None:
        return verdict
    found = classify(Signs(kind=verdict.kind, phase=verdict.phase), own)
    if found is None:
        return verdict
    notes = (*verdict.evidence.notes, *_class_notes(found))
    evidence = replace(verdict.evidence, notes=notes)
    return replace(verdict, failure=found.rule, evidence=evidence)


class Weight(IntEnum):
    """How well a sign can stand for itself; the lowest wins."""

    CAUSE = 0
    HANG = 1
    LEADER = 2
    """Its death is the cause only where no trouble had been seen before."""
    WEAK = 3
    """Seen on one host alone, though mostly a consequence."""
    SYMPTOM = 4


Sign = tuple[Weight, float, Verdict]
"""How much it weighs, when it happened, and what it would mean."""


def _signs(findings: Findings, own: tuple[FailureRule, ...]) -> Iterator[Sign]:
    for lost in findings.lost:
        yield Weight.CAUSE, lost.at - lost.silent_s, _host_lost(lost)
    for stuck in findings.stuck:
        yield Weight.WEAK, stuck.at, _host_lost(stuck)
    for exited in findings.exits:
        if not exited.stopped:
            yield weigh(exited, own), exited.at, _exited(exited, own)
    if findings.hang is not None or findings.judge_by is not None:
        hang = _hang(findings, own)
        yield Weight.HANG, hang.at, hang
    if findings.leader_lost is not None:
        verdict = _leader_lost(findings.leader_lost, findings)
        yield Weight.LEADER, findings.leader_lost, verdict


def weigh(exited: RankExited, own: tuple[FailureRule, ...] = ()) -> Weight:
    if exited.exit_code is None and exited.signal is None and exited.error is None:
        return Weight.WEAK  # its keeper went with it: its launcher broke, or was told to stop
    return Weight.SYMPTOM if _is_symptom(exited, own) else Weight.CAUSE


def _is_symptom(exited: RankExited, own: tuple[FailureRule, ...]) -> bool:
    """Whether the exit is what losing a peer looks like."""
    if exited.exit_code == exits.REFUSED:
        return False
    found = failure_of(exited, own)
    if found is not None and (found.rule.symptom or found.rule in own):
        return found.rule.symptom  # the user knows better than the words below
    if exited.error is not None:
        return SYMPTOMS.search(f"{exited.error.error}: {exited.error.message}") is not None
    aborted = exited.signal == signal.SIGABRT
    passed_on = exited.signal == signal.SIGTERM  # torchrun ends a failed rank's neighbours so
    return passed_on or (aborted and _any_symptom(exited.log_tail))


def timed_out(exited: RankExited) -> bool:
    """Whether a rank ended because a collective took too long."""
    if weigh(exited) is not Weight.SYMPTOM:
        return False
    if exited.error is not None:
        return TIMEOUTS.search(f"{exited.error.error}: {exited.error.message}") is not None
    return any(TIMEOUTS.search(line) for line in exited.log_tail)


def _any_symptom(lines: tuple[str, ...]) -> bool:
    return any(SYMPTOMS.search(line) for line in lines)


def _exited(exited: RankExited, own: tuple[FailureRule, ...]) -> Verdict:
    who = Culprit(host=exited.host, rank=exited.rank)
    found = failure_of(exited, own)
    evidence = Evidence(
        exit_code=exited.exit_code,
        signal=signal_name(exited.signal),
        log_tail=exited.log_tail,
        traceback=exited.error.traceback if exited.error else "",
        notes=_class_notes(found),
    )
    kind, cause, signature = _name(exited)
    return Verdict(
        kind=kind,
        cause=cause,
        culprit=who,
        at=exited.at,
        detected_after_s=exited.detected_after_s,
        evidence=evidence,
        signature=signature,
        final=exited.exit_code == exits.REFUSED,
        failure=found.rule if found else None,
        phase=exited.phase,
    )


@lru_cache(maxsize=1024)  # asked again for each exit that comes after it
def failure_of(exited: RankExited, own: tuple[FailureRule, ...] = ()) -> Classified | None:
    """The class of what ended a rank, by what it raised, else by its log and how it ended."""
    signs = Signs(
        lines=exited.log_tail,
        exit_code=exited.exit_code,
        signal=signal_name(exited.signal),
        kind=_name(exited)[0],
        phase=exited.phase,
    )
    if exited.error is not None:
        raised = f"{exited.error.error}: {exited.error.message}".splitlines()
        signs = replace(signs, lines=tuple(raised))
    return classify(signs, own)


def _class_notes(found: Classified | None) -> tuple[str, ...]:
    if found is None:
        return ()
    rule = found.rule
    return (f"class {rule.name} (scope {rule.scope}): {rule.advice}",)


def _name(exited: RankExited) -> tuple[str, str, str]:
    """Kind, cause and signature of one exit."""
    if exited.exit_code == exits.REFUSED:
        words = exited.error.message if exited.error else _last_line(exited)
        return "refused", f"the trainer refused its configuration: {words}", ""
    if exited.error is not None:
        words = f"{exited.error.error}: {exited.error.message}"
        where = f"{words} at step {exited.error.step}"
        return "exception", f"rank {exited.rank} raised {where}", where
    if exited.signal is not None:
        cause = f"rank {exited.rank} was killed by {signal_name(exited.signal)}"
        return "rank-killed", cause, ""
    if exited.exit_code == exits.CHECKPOINTED:
        cause = f"rank {exited.rank} was told by a signal from outside to checkpoint and leave"
        return "rank-stopped", cause, ""
    if exited.exit_code is None:
        return "rank-lost", f"rank {exited.rank} vanished together with its launcher", ""
    return "rank-exited", f"rank {exited.rank} left with exit code {exited.exit_code}", ""


def _last_line(exited: RankExited) -> str:
    return exited.log_tail[-1] if exited.log_tail else "see its log"


def signal_name(number: int | None) -> str | None:
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _host_lost(lost: AgentLost) -> Verdict:
    return Verdict(
        kind="host-lost",
        cause=f"the agent of {lost.host} is gone: {lost.why}",
        culprit=Culprit(host=lost.host),
        at=lost.at - lost.silent_s,
        detected_after_s=lost.silent_s,
        evidence=Evidence(notes=(f"{lost.why}; last heard {lost.silent_s:.1f} s before",)),
    )


def _leader_lost(last_heard: float, findings: Findings) -> Verdict:
    where = f", and with it the agent of {findings.leader_host}" if findings.leader_host else ""
    return Verdict(
        kind="leader-lost",
        cause=f"the leader went away without a word{where}",
        culprit=Culprit(host=findings.leader_host),
        at=last_heard,
        detected_after_s=max(0.0, findings.noticed_at - last_heard),
        evidence=Evidence(
            notes=("a new leader took over from the journal; `at` is the former one's last line",)
        ),
    )


def _only_symptoms(first: Verdict) -> Verdict:
    """Ranks lost a peer, and no peer is known to have died: nobody is blamed."""
    told = first.failure
    return Verdict(
        kind="connection-lost",
        cause=f"ranks lost their connections; which one broke is not known (first: {first.cause})",
        culprit=NOBODY,
        at=first.at,
        detected_after_s=first.detected_after_s,
        evidence=first.evidence,
        failure=told if told is not None and _tells_of_a_peer(told) else None,
        phase=first.phase,
    )


def _tells_of_a_peer(rule: FailureRule) -> bool:
    return rule.symptom or rule.scope == "scheduler"


def _launch_failed(findings: Findings) -> Verdict:
    failed = [stop for stop in findings.stopped if not stop.finished]
    host = failed[0].host if failed else None
    why = next((stop.why for stop in failed if stop.why), "it ended without saying why")
    return Verdict(
        kind="launch-failed",
        cause=f"torchrun failed on {host or 'an unknown host'}: {why}",
        culprit=Culprit(host=host),
        at=findings.opened_at,
        detected_after_s=0.0,
        evidence=Evidence(log_tail=tuple(why.splitlines()[-20:])),
    )


def _hang(findings: Findings, own: tuple[FailureRule, ...]) -> Verdict:
    """Only a verdict that is sure blames a host, and where the program is to blame, none.

    Where a watchdog spoke first, the failure is of the class of what it said.
    """
    said = None if findings.hang else failure_of(findings.exits[0], own)
    attempt = findings.hang.attempt if findings.hang else findings.exits[0].attempt
    judged = findings.judged or judged_from(findings, attempt)
    seen, at, detected_after_s = _hang_seen(findings)
    sure = bool(judged.hosts) or (judged.scope == "user" and judged.confidence >= SURE)
    rank = judged.ranks[0] if sure and judged.ranks else None
    culprit = Culprit(host=judged.hosts[0] if judged.hosts else None, rank=rank)
    doubt = "" if sure or not judged.ranks else ", but that is not sure enough to blame it"
    sure_of = f"{judged.confidence:.0%} sure"
    notes = (*judged.signs, *(f"waiting: {words}" for words in judged.waiting))
    return Verdict(
        kind="hang",
        cause=f"{seen}; {judged.verdict} ({sure_of}): {judged.cause}{doubt}",
        culprit=culprit,
        at=at,
        detected_after_s=detected_after_s,
        phase=findings.hang.phase if findings.hang else findings.exits[0].phase,
        evidence=Evidence(
            stacks=judged.stacks, notes=(*notes, *_probes(findings), *_class_notes(said))
        ),
        signature=_desync(findings, judged) if sure and judged.scope == "user" else "",
        confidence=judged.confidence,
        failure=said.rule if said else None,
    )


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

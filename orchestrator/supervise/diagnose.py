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
from orchestrator.contract.events import AgentLost, RankEvidence, RankExited
from orchestrator.contract.failures import FailureRule
from orchestrator.contract.phases import Phase
from orchestrator.diagnosis.classes import Classified, Signs, classify
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
    if findings.hang is not None:
        yield Weight.HANG, findings.hang.at - findings.hang.stalled_s, _hang(findings)
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


def _hang(findings: Findings) -> Verdict:
    hang = findings.hang
    assert hang is not None
    seen = {rank.rank: (part.host, rank) for part in findings.evidence for rank in part.ranks}
    blamed, how = _hung_rank([rank for _, rank in seen.values()], hang.behind)
    culprit = NOBODY if blamed is None else Culprit(host=seen[blamed][0], rank=blamed)
    silent = [f"rank {rank}" for rank, (_, found) in sorted(seen.items()) if not found.stack]
    notes = (how, *((f"no stack from {', '.join(silent)}",) if silent else ()))
    who = "no rank" if blamed is None else f"rank {blamed}"
    return Verdict(
        kind="hang",
        cause=f"no rank made progress for {hang.stalled_s:.1f} s in phase {hang.phase}"
        f" (limit {hang.limit_s:.1f} s); {who} is to blame: {how}",
        culprit=culprit,
        at=hang.at - hang.stalled_s,
        detected_after_s=hang.stalled_s,
        phase=hang.phase,
        evidence=Evidence(
            stacks={str(rank): found.stack for rank, (_, found) in sorted(seen.items())},
            notes=notes,
        ),
    )


PROCESS_STATES = {
    "T": "stopped by a signal (state T)",
    "t": "stopped by a debugger (state t)",
    "D": "in an uninterruptible wait of the kernel (state D)",
    "Z": "dead but not reaped (state Z)",
    "gone": "gone",
}


def _hung_rank(ranks: list[RankEvidence], behind: tuple[int, ...]) -> tuple[int | None, str]:
    """The one rank that the others wait for, and how it is known; None when signs disagree."""
    odd = [rank for rank in ranks if rank.process_state in PROCESS_STATES]
    if len(odd) == 1:
        return odd[0].rank, f"its process is {PROCESS_STATES[odd[0].process_state]}"
    mute = [rank for rank in ranks if not rank.stack]
    if len(mute) == 1 and len(ranks) > 1:
        return mute[0].rank, "it alone gave no stack"
    known = [rank for rank in ranks if rank.rank in behind]
    if len(behind) == 1 and known:
        return behind[0], f"it alone is behind, at step {known[0].step}"
    return None, f"no single rank stands out ({len(odd)} stopped, {len(mute)} mute)"

"""What broke and who did it, from everything that was found out about one attempt.

Peers of a rank that died fail too, and often louder. So every sign is sorted by how well it can
stand for itself, those last that are what a peer's death looks like; among equals the earliest.
"""

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import IntEnum

from orchestrator.contract import exits
from orchestrator.contract.events import AgentLost, RankExited
from orchestrator.contract.failures import FailureRule
from orchestrator.diagnosis.classes import Classified, Signs, classify
from orchestrator.supervise.hang_verdict import hang_verdict
from orchestrator.supervise.state import NOBODY, Culprit, Evidence, Findings
from orchestrator.supervise.unfit import is_unfit, with_who_differed
from orchestrator.supervise.verdict import (
    Verdict,
    class_notes,
    exited_verdict,
    failure_of,
    kernel_words,
    last_words,
    told_by_kernel,
)

SYMPTOMS = re.compile(
    r"connection closed by (remote )?peer|connection reset by peer|connection refused|broken pipe"
    r"|gloo/transport|gloo::|connectfullmesh|enforce fail(?! at (alloc_cpu|inline_container))"
    r"|recvvalue failed|sendbytes failed"
    r"|no route to host|socket\w*connect\b.*(timed out|unreachable|connection abort)"
    r"|ibv_\w+ failed.*timed out"
    r"|application timeout caused pair closure|store timed out|socket timeout|wait timeout"
    r"|socket has timed out|timed out waiting|failed to connect|failed to recv"
    r"|nccl.*(remote|peer|watchdog|was aborted)|ncclremoteerror|watchdog caught collective",
    re.IGNORECASE,
)
"""What a rank says when a peer went away (PyTorch's gloo, NCCL and TCPStore)."""

SERVICE = "service-unreachable"
"""Says the same words of what is no peer."""

MOST_UNREACHED = 8
"""Addresses that an incident names …"""
MOST_NAMED = 8
"""… and hosts."""
TOGETHER_S = 3.0
"""Between what happens at once, as agents tell of it once a second."""

TIMEOUTS = re.compile(
    r"watchdog caught collective|collective operation timeout|timed out waiting"
    r"|application timeout caused pair closure|wait timeout|timeout at .*watchdog",
    re.IGNORECASE,
)
"""What a rank says whose collective did not return in time: a hang, seen by the rank itself."""


NO_WAY = re.compile(r"no route to host|timed out|unreachable", re.IGNORECASE)
UNREACHED = re.compile(r"connect to (?:([^\s<]+)<\d+>|([\d.]+):\d+)", re.IGNORECASE)
"""Names the address that NCCL could not connect to …"""
UNANSWERED = re.compile(r"got completion from peer ([^\s<]+)", re.IGNORECASE)
"""… or to which it had sent what was not taken."""


def diagnose(
    findings: Findings,
    own: tuple[FailureRule, ...] = (),
    addresses: Mapping[str, str] | None = None,
    switches: Mapping[str, tuple[str, ...]] | None = None,
) -> Verdict:
    """The first cause of an attempt's trouble; `unknown` is a verdict too, and blames nobody.

    Args:
        own: the user's classes.
        addresses: address -> host.
        switches: host -> those above it, the outermost first.
    """
    signs = sorted(_signs(findings, own), key=lambda sign: sign[:2])
    if not signs:
        return _classed(_launch_failed(findings, own), own)
    weight, _, verdict = signs[0]
    together = _together(verdict, [sign[2] for sign in signs if sign[0] is weight], findings)
    if together:
        verdict = _nobodys(verdict, together, switches or {})
    if weight is Weight.SYMPTOM:
        verdict = _only_symptoms(verdict, tuple(_unreached(findings, addresses or {})))
    return _classed(verdict, own)


def _classed(verdict: Verdict, own: tuple[FailureRule, ...]) -> Verdict:
    """With its class: of what no log line tells, by how it was seen."""
    if verdict.failure is not None:
        return verdict
    found = classify(Signs(kind=verdict.kind, phase=verdict.phase), own)
    if found is None:
        return verdict
    notes = (*verdict.evidence.notes, *class_notes(found))
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
    kernels = kernel_words(findings, own)
    for exited in findings.exits:
        if not exited.stopped:
            said = told_by_kernel(kernels.get(exited.host, ()), exited, own)
            weight = Weight.CAUSE if said is not None else weigh(exited, own)
            verdict = exited_verdict(exited, own, said)
            if said is None and is_unfit(exited, own):
                verdict = with_who_differed(verdict, exited, findings)
            yield weight, exited.at, verdict
    if findings.hang is not None or findings.judge_by is not None:
        hang = hang_verdict(findings, own)
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
    if found is not None and found.rule.name == SERVICE:
        return False
    if found is not None and found.line and found.rule.scope == "user":
        return False  # gloo ends a rank with the words of a connection over sizes that differ
    if exited.error is not None:
        return SYMPTOMS.search(f"{exited.error.error}: {exited.error.message}") is not None
    aborted = exited.signal == signal.SIGABRT
    passed_on = exited.signal == signal.SIGTERM  # torchrun ends a failed rank's neighbours so
    return passed_on or (aborted and _any_symptom(last_words(exited)))


def timed_out(exited: RankExited) -> bool:
    """Whether a rank ended because a collective took too long."""
    if weigh(exited) is not Weight.SYMPTOM:
        return False
    if exited.error is not None:
        return TIMEOUTS.search(f"{exited.error.error}: {exited.error.message}") is not None
    return any(TIMEOUTS.search(line) for line in exited.log_tail)


def _any_symptom(lines: tuple[str, ...]) -> bool:
    return any(SYMPTOMS.search(line) for line in lines)


def _host_lost(lost: AgentLost) -> Verdict:
    return Verdict(
        kind="host-lost",
        cause=f"the agent of {lost.host} is gone: {lost.why}",
        culprit=Culprit(host=lost.host),
        at=lost.at - lost.silent_s,
        detected_after_s=lost.silent_s,
        evidence=Evidence(notes=(f"{lost.why}; last heard {lost.silent_s:.1f} s before",)),
    )


def _together(first: Verdict, causes: Iterable[Verdict], findings: Findings) -> tuple[str, ...]:
    """The hosts that the same befell at the same moment, by name; none where it was one alone.

    Hosts break one by one. What befalls several at once they share: a switch, power, a setting.
    """
    if not _is_of_a_host(first) or any(lost.taken for lost in findings.lost):
        return ()
    hosts = {
        one.culprit.host
        for one in causes
        if _same(one, first) and one.at - first.at <= TOGETHER_S and one.culprit.host is not None
    }
    return tuple(sorted(hosts)) if len(hosts) > 1 else ()


def _is_of_a_host(verdict: Verdict) -> bool:
    """Or would be, if it befell one alone, as a service that one host cannot reach."""
    if verdict.failure is None:
        return verdict.kind == "host-lost"
    return verdict.failure.scope == "host" or verdict.failure.name == SERVICE


def _same(one: Verdict, other: Verdict) -> bool:
    if one.failure is None or other.failure is None:
        return one.failure is other.failure and one.kind == other.kind
    return one.failure.name == other.failure.name


def _nobodys(
    first: Verdict, hosts: tuple[str, ...], switches: Mapping[str, tuple[str, ...]]
) -> Verdict:
    """What befell several hosts at once is none's own."""
    above = [switches.get(host, ()) for host in hosts]
    shared = [name for name in above[0] if all(name in others for others in above)]
    named = ", ".join(hosts[:MOST_NAMED])
    named += f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    under = f", all below {shared[-1]}" if shared else ""
    what = f"had {first.failure.name}" if first.failure is not None else "went away"
    return replace(
        first,
        kind="hosts-lost" if first.failure is None else first.kind,
        cause=f"{len(hosts)} hosts {what} at once: {named}{under} (first: {first.cause})",
        culprit=NOBODY,
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


def _unreached(findings: Findings, addresses: Mapping[str, str]) -> Iterator[str]:
    """Whom ranks could not connect to: it may be that host's link, or the way to it."""
    tried = Counter(
        address for exited in findings.exits if not exited.stopped for address in _tried(exited)
    )
    for (how, address), count in tried.most_common(MOST_UNREACHED):
        name = f", which is {addresses[address]}" if address in addresses else ""
        many = "1 rank" if count == 1 else f"{count} ranks"
        yield f"{many} {how} {address}{name}"


def _tried(exited: RankExited) -> set[tuple[str, str]]:
    """How a rank failed to reach an address."""
    found = set()
    for line in exited.error.message.splitlines() if exited.error else exited.log_tail:
        if (match := UNREACHED.search(line)) and NO_WAY.search(line):
            found.add(("could not connect to", match[1] or match[2]))
        if match := UNANSWERED.search(line):
            found.add(("had an InfiniBand error towards", match[1]))
    return found


def _only_symptoms(first: Verdict, notes: tuple[str, ...] = ()) -> Verdict:
    """Ranks lost a peer, and no peer is known to have died: nobody is blamed."""
    told = first.failure
    return Verdict(
        kind="connection-lost",
        cause=f"ranks lost their connections; which one broke is not known (first: {first.cause})",
        culprit=NOBODY,
        at=first.at,
        detected_after_s=first.detected_after_s,
        evidence=replace(first.evidence, notes=(*first.evidence.notes, *notes)),
        failure=told if told is not None and _tells_of_a_peer(told) else None,
        phase=first.phase,
    )


def _tells_of_a_peer(rule: FailureRule) -> bool:
    return rule.symptom or rule.scope in ("scheduler", "fabric")


def _launch_failed(findings: Findings, own: tuple[FailureRule, ...]) -> Verdict:
    failed = [stop for stop in findings.stopped if not stop.finished]
    host = failed[0].host if failed else None
    why = next((stop.why for stop in failed if stop.why), "it ended without saying why")
    words = [line.strip() for line in why.splitlines() if line.strip()]
    found = _of_torchrun(tuple(words), own)
    return Verdict(
        kind="launch-failed",
        cause=f"torchrun failed on {host or 'an unknown host'}: {': '.join(_ends(words))}",
        culprit=Culprit(host=host),
        at=findings.opened_at,
        detected_after_s=0.0,
        evidence=Evidence(log_tail=tuple(why.splitlines()[-20:]), notes=class_notes(found)),
        failure=found.rule if found is not None else None,
    )


def _ends(words: list[str]) -> list[str]:
    """That it ended, and the last that it said: of a traceback, what was raised."""
    return words[:1] + words[1:][-1:]


def _of_torchrun(words: tuple[str, ...], own: tuple[FailureRule, ...]) -> Classified | None:
    """A class that a restart meets again. Else it is a launch that failed: torchrun's words are of
    programs that end, and of peers, whatever the cause."""
    found = classify(Signs(lines=words, kind="launch-failed"), own)
    again = found is not None and (found.rule in own or found.rule.action != "restart")
    return found if again else None

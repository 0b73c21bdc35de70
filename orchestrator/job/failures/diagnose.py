"""What broke and who did it, from everything that was found out about one attempt.

Peers of a rank that died fail too, and often louder. So every sign is sorted by how well it can
stand for itself, those last that are what a peer's death looks like; among equals the earliest.
"""

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

from orchestrator.contract.launch import Breakdown
from orchestrator.contract.messages.events import AgentLost, HostStopped, RankExited
from orchestrator.contract.spec.failures import FailureRule, Reading
from orchestrator.diagnosis.classes import Signs, classify, reading_of
from orchestrator.diagnosis.logs.readings import SERVICE
from orchestrator.job.failures.collective_mismatch import is_unfit, with_who_differed
from orchestrator.job.failures.exit_classification import (
    Verdict,
    class_notes,
    exited_verdict,
    kernel_words,
    told_by_kernel,
)
from orchestrator.job.failures.hang_verdict import hang_verdict
from orchestrator.job.findings import Findings
from orchestrator.job.incident import NOBODY, Culprit, Evidence

MOST_UNREACHED = 8
"""Addresses that an incident names …"""
MOST_NAMED = 8
"""… and hosts."""
TOGETHER_S = 3.0
"""Between what happens at once, as agents tell of it once a second."""

# None of these three can backtrack over more than a word of a line.
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
    signs = sorted(_signs(findings), key=lambda sign: sign[:2])
    if not signs:
        return _classed(_launch_failed(findings), own)
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
    signs = Signs(kind=verdict.kind, phase=verdict.phase)
    found = reading_of(classify(signs, own), own)
    notes = (*verdict.evidence.notes, *class_notes(found))
    evidence = replace(verdict.evidence, notes=notes)
    return replace(verdict, failure=found, evidence=evidence)


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


def _signs(findings: Findings) -> Iterator[Sign]:
    yield from _signs_of_hosts(findings)
    yield from _signs_of_exits(findings)
    if findings.hang is not None or findings.judge_by is not None:
        hang = hang_verdict(findings)
        yield Weight.HANG, hang.at, hang
    if findings.broke is not None:
        yield Weight.CAUSE, findings.broke.at, _allocation_broke(findings.broke, findings)
    elif findings.leader_lost is not None:
        verdict = _leader_lost(findings.leader_lost, findings)
        yield Weight.LEADER, findings.leader_lost, verdict


def _signs_of_hosts(findings: Findings) -> Iterator[Sign]:
    alone = [stopped for stopped in findings.stopped if stopped.alone_s]
    if alone:
        verdict = _cut_off(alone)
        yield Weight.CAUSE, verdict.at, verdict
    for lost in findings.lost:
        if lost.host in {stopped.host for stopped in alone}:
            continue  # it was there all the time
        yield Weight.CAUSE, lost.at - lost.silent_s, _host_lost(lost)
    for stuck in findings.stuck:
        yield Weight.WEAK, stuck.at, _host_lost(stuck)


def _signs_of_exits(findings: Findings) -> Iterator[Sign]:
    kernels = kernel_words(findings)
    for exited in findings.exits:
        if exited.stopped:
            continue
        said = told_by_kernel(kernels.get(exited.host, ()), exited)
        weight = Weight.CAUSE if said is not None else weigh(exited)
        verdict = exited_verdict(exited, said)
        if said is None and is_unfit(exited):
            verdict = with_who_differed(verdict, exited, findings)
        yield weight, exited.at, verdict


def weigh(exited: RankExited) -> Weight:
    if exited.exit_code is None and exited.signal is None and exited.error is None:
        return Weight.WEAK  # its keeper went with it: its launcher broke, or was told to stop
    return Weight.SYMPTOM if _is_symptom(exited) else Weight.CAUSE


def _is_symptom(exited: RankExited) -> bool:
    """Whether the exit is what losing a peer looks like."""
    if exited.reading is not None:
        return exited.reading.symptom
    # Of an older journal: torchrun ends a failed rank's neighbours by SIGTERM.
    return exited.error is None and exited.signal == signal.SIGTERM


def timed_out(exited: RankExited) -> bool:
    """Whether a rank ended because a collective took too long."""
    return exited.reading is not None and exited.reading.timed_out


def _cut_off(alone: Sequence[HostStopped]) -> Verdict:
    """Both the leader and the agents that did not hear it were there all the time."""
    hosts = sorted({stopped.host for stopped in alone})
    first = min(alone, key=lambda stopped: stopped.at - stopped.alone_s)
    return Verdict(
        kind="cut-off",
        cause=f"the leader and {_names(hosts)} did not hear each other for {first.alone_s:.1f} s,"
        " so ranks were stopped; they hear each other again",
        culprit=NOBODY,
        at=first.at - first.alone_s,
        detected_after_s=first.alone_s,
        evidence=Evidence(
            notes=(
                "the leader and these agents lived all the time; the way between them, or either"
                " end of it, broke",
            )
        ),
    )


def _host_lost(lost: AgentLost) -> Verdict:
    if lost.cut_off_s:
        return Verdict(
            kind="cut-off",
            cause=f"for {lost.cut_off_s:.1f} s the leader heard neither the scheduler nor"
            f" {lost.host}, which did not come back: which of the two hosts was cut off is not"
            " known",
            culprit=NOBODY,
            at=lost.at - lost.silent_s,
            detected_after_s=lost.silent_s,
            evidence=Evidence(notes=(f"{lost.host}: {lost.why}",)),
        )
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
    under = f", all below {shared[-1]}" if shared else ""
    what = f"had {first.failure.name}" if first.failure is not None else "went away"
    return replace(
        first,
        kind="hosts-lost" if first.failure is None else first.kind,
        cause=f"{len(hosts)} hosts {what} at once: {_names(hosts)}{under} (first: {first.cause})",
        culprit=NOBODY,
    )


def _names(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    return ", ".join(hosts[:MOST_NAMED]) + more


def _allocation_broke(broke: Breakdown, findings: Findings) -> Verdict:
    """All agents went, or are going, and none of them or of their hosts is the cause."""
    return Verdict(
        kind="allocation-broke",
        cause=broke.what,
        culprit=NOBODY,
        at=broke.at,
        detected_after_s=max(0.0, findings.noticed_at - broke.at),
        evidence=Evidence(),
    )


def _leader_lost(last_heard: float, findings: Findings) -> Verdict:
    where = f", and with it the agent of {findings.leader_host}" if findings.leader_host else ""
    how = f": {findings.leader_ended}" if findings.leader_ended else ""
    return Verdict(
        kind="leader-lost",
        cause=f"the leader went away without a word{where}{how}",
        culprit=Culprit(host=findings.leader_host),
        at=last_heard,
        detected_after_s=max(0.0, findings.noticed_at - last_heard),
        evidence=Evidence(
            notes=(
                "a new leader took over from the journal; `at` is the former one's last line there,"
                " or the last step of its attempt",
            )
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


def _tells_of_a_peer(told: Reading) -> bool:
    return told.symptom or told.scope in ("scheduler", "fabric")


def _launch_failed(findings: Findings) -> Verdict:
    failed = [stop for stop in findings.stopped if not stop.finished]
    host = failed[0].host if failed else None
    first = next((stop for stop in failed if stop.why), None)
    why = first.why if first else "it ended without saying why"
    words = [line.strip() for line in why.splitlines() if line.strip()]
    found = first.reading if first else None
    return Verdict(
        kind="launch-failed",
        cause=f"torchrun failed on {host or 'an unknown host'}: {': '.join(_ends(words))}",
        culprit=Culprit(host=host),
        at=findings.opened_at,
        detected_after_s=0.0,
        evidence=Evidence(log_tail=tuple(why.splitlines()[-20:]), notes=class_notes(found)),
        failure=found,
    )


def _ends(words: list[str]) -> list[str]:
    """That it ended, and the last that it said: of a traceback, what was raised."""
    return words[:1] + words[1:][-1:]

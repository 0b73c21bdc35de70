"""Finds what broke an attempt, and which rank or host caused it.

The peers of a rank that died fail too, and often with more output. So every sign gets a weight that
says how well it explains itself. Signs that a peer's death causes weigh least. Among equal signs
the earliest is the first cause.
"""

import math
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

from msgspec.structs import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import AgentLost, HostStopped, RankExited
from orchestrator.contract.spec.failures import FailureRule, Reading
from orchestrator.diagnosis.cause.exits import (
    CONNECTION_LOST,
    PYTHON,
    class_notes,
    exited_verdict,
    explained_by_kernel,
    is_mismatch,
    kernel_lines,
)
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.hang_verdict import hang_verdict
from orchestrator.diagnosis.cause.host_verdicts import (
    allocation_broke,
    cut_off,
    host_lost,
    launch_failed,
    leader_lost,
    shared_cause,
)
from orchestrator.diagnosis.cause.mismatch import mismatch_verdict
from orchestrator.diagnosis.cause.verdict import NOBODY, Verdict
from orchestrator.diagnosis.classes import FailureSigns, classify, reading_of
from orchestrator.diagnosis.logs.readings import SERVICE

MOST_UNREACHED = 8
"""Addresses that an incident names."""
TOGETHER_S = 3.0
"""Failures at most this far apart count as one: agents report once a second."""

# These patterns backtrack over at most one word of a line.
NO_WAY = re.compile(r"no route to host|timed out|unreachable", re.IGNORECASE)
UNREACHED = re.compile(r"connect to (?:([^\s<]+)<\d+>|([\d.]+):\d+)", re.IGNORECASE)
"""The address that NCCL failed to connect to."""
UNANSWERED = re.compile(r"got completion from peer ([^\s<]+)", re.IGNORECASE)
"""The address whose host did not acknowledge what NCCL sent."""


class Weight(IntEnum):
    """How well a sign explains itself; the lowest wins."""

    CAUSE = 0
    HANG = 1
    LEADER = 2
    """The loss of a leader is the cause only if no failure was seen before it."""
    WEAK = 3
    """Seen on one host alone, but usually a consequence."""
    ENDED_FIRST = 4
    """A rank that returned 0 first. Its peers lose their connections to it, and nothing else."""
    SYMPTOM = 5


Sign = tuple[Weight, float, Verdict]
"""Its weight, when it happened, and the verdict if it is the first cause."""


def diagnose(
    findings: Findings,
    own: tuple[FailureRule, ...] = (),
    addresses: Mapping[str, str] | None = None,
    switches: Mapping[str, tuple[str, ...]] | None = None,
) -> Verdict:
    """The first cause of an attempt's failure; the verdict `unknown` has no culprit.

    Args:
        own: the user's failure classes.
        addresses: address -> host.
        switches: host -> the switches above it, the outermost first.
    """
    signs = sorted(_signs(findings), key=lambda sign: sign[:2])
    if not signs:
        return _with_class(launch_failed(findings), own)
    weight, _, verdict = _first(signs)
    together = _together(verdict, [sign[2] for sign in signs if sign[0] is weight], findings)
    if together:
        spread_s = max(together.values()) - verdict.at
        when = "at once" if spread_s <= TOGETHER_S else f"within {spread_s:.0f} s"
        verdict = shared_cause(verdict, tuple(sorted(together)), switches or {}, when)
    if weight is Weight.SYMPTOM:
        verdict = _only_symptoms(verdict, tuple(_unreached(findings, addresses or {})))
    return _with_class(verdict, own)


def _first(signs: Sequence[Sign]) -> Sign:
    """The sign of the first cause.

    A library may report a lost peer as an exception of its own, with no word of a connection. And
    the clocks of hosts differ, and agents report once a second. So a kill from outside on another
    host comes before an exception of no known kind if it was at nearly the same time: no exception
    kills a rank on another host. On its own host it may: versions of Lightning killed the peers of
    a rank that failed.
    """
    first = signs[0]
    weight, at, verdict = first
    if weight is Weight.SYMPTOM and verdict.evidence.signal == "SIGTERM":
        # torchrun ends the other ranks of its host as soon as one exits, and their ends may be
        # noticed before that exit.
        near = (sign for sign in signs if sign[1] - at <= TOGETHER_S)
        own = (sign for sign in near if _exited_on(sign[2], verdict.culprit.host))
        return next(own, first)
    if verdict.failure is None or verdict.failure.name != PYTHON:
        return first
    near = (sign for sign in signs if sign[0] is weight and sign[1] - at <= TOGETHER_S)
    kills = (sign for sign in near if _is_kill_elsewhere(sign[2], verdict.culprit.host))
    return next(kills, first)


def _exited_on(verdict: Verdict, host: str | None) -> bool:
    code = verdict.evidence.exit_code
    return code not in (None, exit_codes.CHECKPOINTED) and verdict.culprit.host == host


def _is_kill_elsewhere(verdict: Verdict, host: str | None) -> bool:
    killed = verdict.kind == "rank-killed" and verdict.evidence.signal == "SIGKILL"
    return killed and verdict.culprit.host != host


def _with_class(verdict: Verdict, own: tuple[FailureRule, ...]) -> Verdict:
    """The verdict with a failure class. If no log line gave it one, the way it was seen does."""
    if verdict.failure is not None:
        return verdict
    signs = FailureSigns(kind=verdict.kind, phase=verdict.phase)
    found = reading_of(classify(signs, own), own)
    notes = (*verdict.evidence.notes, *class_notes(found))
    evidence = replace(verdict.evidence, notes=notes)
    return replace(verdict, failure=found, evidence=evidence)


# Signs


def _signs(findings: Findings) -> Iterator[Sign]:
    exits = tuple(_signs_of_exits(findings))
    # Hosts first: a rank whose host is lost at the same moment fails because of that.
    yield from _signs_of_hosts(findings, failed=any(sign[0] is Weight.CAUSE for sign in exits))
    yield from exits
    if findings.hang is not None or findings.judge_by is not None:
        hang = hang_verdict(findings)
        yield Weight.HANG, hang.at, hang
    if findings.broke is not None:
        yield Weight.CAUSE, findings.broke.at, allocation_broke(findings.broke, findings)
    elif findings.leader_lost is not None:
        verdict = leader_lost(findings.leader_lost, findings)
        yield Weight.LEADER, findings.leader_lost, verdict


def _signs_of_hosts(findings: Findings, *, failed: bool) -> Iterator[Sign]:
    """`failed`: a rank failed by itself."""
    alone = [stopped for stopped in findings.stopped if stopped.alone_s]
    if alone:
        verdict = cut_off(alone, _silent_with(findings.lost, alone))
        # An agent that stops its ranks makes their peers lose connections, and nothing else. So a
        # rank that failed by itself did so whether or not agents were alone at that time.
        yield Weight.WEAK if failed else Weight.CAUSE, verdict.at, verdict
    # An agent that stopped its ranks because it was alone was there all the time.
    there = {stopped.host for stopped in alone} | {*_silent_with(findings.lost, alone)}
    for lost in _with_known_cuts(findings.lost):
        if lost.host not in there:
            # The same holds for a host that was silent while the leader itself was cut off.
            weight = Weight.WEAK if failed and lost.cut_off_s else Weight.CAUSE
            yield weight, lost.at - lost.silent_s, host_lost(lost)
    for stuck in findings.stuck:
        yield Weight.WEAK, stuck.at, host_lost(stuck)


def _silent_with(lost: Sequence[AgentLost], alone: Sequence[HostStopped]) -> list[str]:
    """Hosts that fell silent when agents in `alone` lost the leader, and are not heard again. The
    same broken network explains both."""
    back = {stopped.host for stopped in alone}
    since = [stopped.at - stopped.alone_s for stopped in alone]
    return [
        one.host
        for one in lost
        if one.host not in back
        and not one.taken
        and any(abs(one.at - one.silent_s - at) <= TOGETHER_S for at in since)
    ]


def _with_known_cuts(lost: Sequence[AgentLost]) -> Iterator[AgentLost]:
    """The leader may report one host as lost before it notices that it is cut off itself. Hosts
    that fell silent at the same moment as one of a known cut were cut off by it too."""
    cuts = [(one.at - one.silent_s, one.cut_off_s) for one in lost if one.cut_off_s]
    for one in lost:
        heard = one.at - one.silent_s
        near = [cut_off_s for at, cut_off_s in cuts if abs(at - heard) <= TOGETHER_S]
        known = bool(one.cut_off_s or one.taken or not near)
        yield one if known else replace(one, cut_off_s=near[0])


def _signs_of_exits(findings: Findings) -> Iterator[Sign]:
    kernels = kernel_lines(findings)
    for exited in findings.exits:
        # The rank ended after its agent had begun to stop it, so its exit explains nothing.
        if exited.stopped:
            continue
        hardware = explained_by_kernel(kernels.get(exited.host, ()), exited)
        weight = Weight.CAUSE if hardware is not None else weigh(exited)
        verdict = exited_verdict(exited, hardware)
        if hardware is None and is_mismatch(exited):
            verdict = mismatch_verdict(verdict, exited, findings)
        yield weight, exited.at, verdict


def weigh(exited: RankExited) -> Weight:
    if exited.exit_code is None and exited.signal is None and exited.error is None:
        return Weight.WEAK  # its keeper died with it: torchrun failed, or was told to stop
    if exited.ended_first:
        return Weight.ENDED_FIRST
    return Weight.SYMPTOM if _is_symptom(exited) else Weight.CAUSE


def _is_symptom(exited: RankExited) -> bool:
    """The death of a peer can cause an exit like this one."""
    if exited.reading is not None:
        return exited.reading.symptom
    # Journals of older versions have no reading. torchrun ends the neighbours of a failed rank.
    return exited.error is None and exited.signal == signal.SIGTERM


# Several hosts at once


def _together(first: Verdict, causes: Iterable[Verdict], findings: Findings) -> Mapping[str, float]:
    """Hosts to which the same happened together -> when; empty if it was one host.

    Hosts break one by one. A failure of several at once is in what they share: a switch, the power,
    a setting.
    """
    if not _is_of_a_host(first) or any(lost.taken for lost in findings.lost):
        return {}
    # While no rank runs, a lost host makes no other fail. If several are lost before the next
    # start, perhaps again and again over a bad network, the first is not the cause of the others.
    within_s = math.inf if findings.idle else TOGETHER_S
    hosts = {
        one.culprit.host: one.at
        for one in causes
        if _same(one, first) and one.at - first.at <= within_s and one.culprit.host is not None
    }
    if first.failure is None:
        # A host that was lost while the job left its hosts is no culprit, but may share the cause.
        for lost in findings.left:
            if abs(lost.at - lost.silent_s - first.at) <= within_s:
                hosts.setdefault(lost.host, lost.at - lost.silent_s)
    return hosts if len(hosts) > 1 else {}


def _is_of_a_host(verdict: Verdict) -> bool:
    """A single such failure blames the host. A service that one host cannot reach does so too."""
    if verdict.failure is None:
        return verdict.kind == "host-lost"
    return verdict.failure.scope == "host" or verdict.failure.name == SERVICE


def _same(one: Verdict, other: Verdict) -> bool:
    if one.failure is None or other.failure is None:
        return one.failure is other.failure and one.kind == other.kind
    return one.failure.name == other.failure.name


# Symptoms only


def _only_symptoms(first: Verdict, notes: tuple[str, ...] = ()) -> Verdict:
    """Ranks lost a peer, and no peer is known to have died: there is no culprit."""
    found = first.failure
    return Verdict(
        kind=CONNECTION_LOST,
        cause=f"ranks lost their connections; which one broke is not known (first: {first.cause})",
        culprit=NOBODY,
        at=first.at,
        detected_after_s=first.detected_after_s,
        evidence=replace(first.evidence, notes=(*first.evidence.notes, *notes)),
        failure=found if found is not None and _is_about_a_peer(found) else None,
        phase=first.phase,
    )


def _is_about_a_peer(found: Reading) -> bool:
    return found.symptom or found.scope in ("scheduler", "fabric")


def _unreached(findings: Findings, addresses: Mapping[str, str]) -> Iterator[str]:
    """Addresses that ranks failed to reach: the link of that host, or the path to it, may be
    broken."""
    tried = Counter(
        address for exited in findings.exits if not exited.stopped for address in _tried(exited)
    )
    for (how, address), count in tried.most_common(MOST_UNREACHED):
        name = f", which is {addresses[address]}" if address in addresses else ""
        many = "1 rank" if count == 1 else f"{count} ranks"
        yield f"{many} {how} {address}{name}"


def _tried(exited: RankExited) -> set[tuple[str, str]]:
    """How a rank failed to reach an address, and the address."""
    found = set()
    for line in exited.error.message.splitlines() if exited.error else exited.log_tail:
        if (match := UNREACHED.search(line)) and NO_WAY.search(line):
            found.add(("could not connect to", match[1] or match[2]))
        if match := UNANSWERED.search(line):
            found.add(("had an InfiniBand error towards", match[1]))
    return found

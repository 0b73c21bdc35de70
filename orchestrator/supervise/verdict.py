"""What one exit, or one line of a kernel, means: kind, class, words."""

import re
import signal
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from orchestrator.contract import exits
from orchestrator.contract.events import RankExited
from orchestrator.contract.failures import FailureRule, Scope
from orchestrator.contract.phases import Phase
from orchestrator.diagnosis.classes import Classified, Signs, classify, default_rules, fit
from orchestrator.supervise.state import NOBODY, Culprit, Evidence, Findings

OUTSIDE = frozenset({"SIGKILL", "SIGTERM"})
"""A process does not end itself by these."""
FIX = "\n  fix: "
"""Before the fix, in the words of an error of ours (`NdctlError`)."""
OUT_OF_MEMORY = "host-out-of-memory"
WATCHDOG = "nccl-watchdog-timeout"
SHARED: tuple[Scope, ...] = ("fabric", "storage")
CRASHES = frozenset({signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
"""What neither a network nor a file system ends a process by; by SIGBUS that it had mapped."""
ABORTS = re.compile(
    r"terminate called|terminating due to uncaught|^\s*what\(\):|pure virtual method called"
    r"|Fatal (Python|glibc) error|thread terminated with exception|Assertion .*failed|Check failed:"
    r"|(free|malloc|realloc|munmap_chunk|malloc_consolidate|calloc)\(\): |double free or corruption"
    r"|corrupted (size|double-linked list|unsorted chunks)"
    r"|(stack smashing|buffer overflow) detected|^(\[rank\d+\]:)?\[F(\d+ | \S+\.cpp:)"
    r"|watchdog caught collective|detected by watchdog|watchdog got stuck"
    r"|NCCL operations have failed or timed out",
    re.IGNORECASE,
)
"""How the last words of a process begin that aborts."""
CRASHED = re.compile("Fatal Python error:")
TRACEBACK = re.compile(r"^(\[rank\d+\]: *)?Traceback \(most recent call last\):\s*$")
CHAINED = re.compile("During handling of the above|above exception was the direct cause")
"""Before a traceback that goes on from the one above it …"""
IGNORED = re.compile("Exception ignored (in|on)")
"""… before one that ended nothing …"""
ASIDE = re.compile(f"{IGNORED.pattern}|^Exception in thread ")
"""… or no more than a thread."""
WARNED = re.compile(r"^(\[rank\d+\]:)?\[W(\d+ | \S+\.cpp:)")
ENDINGS = frozenset({"abort", "segfault", "python-exception", "unknown"})
"""Classes by how a process ended, where it said nothing else that is known."""


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
    drill: str | None = None
    """The drill that made it happen."""
    fix: str = ""
    """What to do about this very one, where that is known better than of its class."""


def exited_verdict(
    exited: RankExited, own: tuple[FailureRule, ...], hardware: Classified | None
) -> Verdict:
    who = Culprit(host=exited.host, rank=exited.rank)
    found = hardware or failure_of(exited, own)
    seen = (f"the kernel of {exited.host}: {hardware.line}",) if hardware else ()
    evidence = Evidence(
        exit_code=exited.exit_code,
        signal=signal_name(exited.signal),
        log_tail=exited.log_tail,
        traceback=exited.error.traceback if exited.error else "",
        notes=(*seen, *class_notes(found)),
    )
    kind, cause, signature = name_of(exited)
    if hardware is not None:
        # The program did not do it, so a second time would not be the program's own either.
        cause, signature = f"{hardware.rule.name} on {exited.host}; {cause}", ""
    elif exited.exit_code == exits.REFUSED:
        # Every rank refuses the same configuration: which one is heard first is chance. Where in
        # our code it was noticed, and the log that says it again, tell a person nothing.
        who, evidence = NOBODY, replace(evidence, log_tail=(), traceback="", notes=())
    elif exited.exit_code == exits.UNSTABLE:
        who = NOBODY  # all ranks have the same totals: who is the first to leave is chance
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
        fix=_fix_of(exited) if exited.exit_code == exits.REFUSED else "",
    )


def _fix_of(exited: RankExited) -> str:
    """What the trainer says to do, which stands behind its message."""
    return exited.error.message.partition(FIX)[2].strip() if exited.error else ""


@lru_cache(maxsize=1024)  # asked again for each exit that comes after it
def failure_of(exited: RankExited, own: tuple[FailureRule, ...] = ()) -> Classified | None:
    """The class of what ended a rank, by what it raised, else by its log and how it ended.

    A log also tells of what did no harm, as a save that failed an hour ago or a connection that
    came at the second try: of a rank that was killed its lines tell only what kills, and of one
    that crashed only what it said of that.
    """
    signs = Signs(
        lines=exited.log_tail,
        exit_code=exited.exit_code,
        signal=signal_name(exited.signal),
        kind=name_of(exited)[0],
        phase=exited.phase,
    )
    if exited.error is not None:
        raised = f"{exited.error.error}: {exited.error.message}".splitlines()
        return classify(replace(signs, lines=tuple(raised)), own)
    by = _ended_by(exited)
    if by in OUTSIDE:
        named = tuple(rule for rule in own if _names(rule, by))
        return classify(signs, named, [rule for rule in default_rules() if _kills(rule, by)])
    found = classify(replace(signs, lines=last_words(exited)), own)
    if found is not None and found.rule.name not in ENDINGS:
        return found
    anywhere = [rule for rule in default_rules() if by is not None and _stands(rule)]
    return classify(signs, own, anywhere) or found


def breaks_its_host(exited: RankExited, own: tuple[FailureRule, ...] = ()) -> bool:
    """Whether a rank says of its host's hardware what nothing but that can make it say."""
    found = failure_of(exited, own)
    return found is not None and _is_broken_hardware(found.rule)


def last_words(exited: RankExited) -> tuple[str, ...]:
    """What a rank said as it ended, from where that begins: no old warning is among it. One that
    left by itself without a traceback may have said why in any line."""
    lines = exited.log_tail
    if exited.signal == signal.SIGABRT:
        return _unwarned(_without(ASIDE, lines[_first(ABORTS, lines) :]))
    if exited.signal is not None:
        begins = _first(CRASHED, lines)
        return lines[begins : begins + 1]
    heard = _without(ASIDE, lines)
    if _first(TRACEBACK, heard) == len(heard):
        return _without(IGNORED, lines)
    return _unwarned(heard[_raised_at(heard) :])


def _unwarned(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Without torch's own warnings, as of a store that a peer left: those end nothing."""
    return tuple(line for line in lines if not WARNED.search(line))


def _first(begins: re.Pattern[str], lines: tuple[str, ...]) -> int:
    return next((n for n, line in enumerate(lines) if begins.search(line)), len(lines))


def _without(begins: re.Pattern[str], lines: tuple[str, ...]) -> tuple[str, ...]:
    """Without the tracebacks that come after such a line, each to what was raised at its end."""
    heard = []
    inside = ended = False
    for line in lines:
        if begins.search(line) or (ended and CHAINED.search(line)):
            inside, ended = True, False
        elif inside:
            ended = bool(line.strip()) and not line[0].isspace() and not TRACEBACK.search(line)
            inside = not ended
        elif line.strip() or not ended:
            ended = False
            heard.append(line)
    return tuple(heard)


def _raised_at(lines: tuple[str, ...]) -> int:
    """Where the last traceback begins, with those that led to it."""
    found = 0
    for n, line in enumerate(lines):
        goes_on = CHAINED.search(" ".join(lines[max(0, n - 3) : n]))
        found = n if TRACEBACK.search(line) and not goes_on else found
    return found


def _ended_by(exited: RankExited) -> str | None:
    """The signal, also of a rank that left because of one, and of one that nobody saw end."""
    if exited.exit_code == exits.CHECKPOINTED:
        return "SIGTERM"
    if exited.exit_code is None and exited.signal is None:
        return "SIGKILL"
    return signal_name(exited.signal)


def _kills(rule: FailureRule, by: str) -> bool:
    """Whether a line that fits the rule can be why a rank was ended from outside."""
    killed_for_memory = by == "SIGKILL" and rule.name == OUT_OF_MEMORY
    return _names(rule, by) or rule.scope == "scheduler" or killed_for_memory


def _stands(rule: FailureRule) -> bool:
    """Whether a line that fits the rule is why a rank crashed, wherever in its log it stands: no
    rank outlives broken hardware, the scheduler's end of the job or NCCL's watchdog, after which
    it may well crash in another way. A warning may be old."""
    ends_it = rule.scope == "scheduler" or rule.name == WATCHDOG or _is_broken_hardware(rule)
    return bool(rule.patterns) and ends_it


def _is_broken_hardware(rule: FailureRule) -> bool:
    return rule.scope == "host" and rule.action == "replace"


def _names(rule: FailureRule, by: str) -> bool:
    return not rule.patterns or by in rule.signals


def class_notes(found: Classified | None) -> tuple[str, ...]:
    if found is None:
        return ()
    rule = found.rule
    return (f"class {rule.name} (scope {rule.scope}): {rule.advice}",)


def name_of(exited: RankExited) -> tuple[str, str, str]:
    """Kind, cause and signature of one exit."""
    if exited.exit_code == exits.REFUSED:
        words = exited.error.message.partition(FIX)[0] if exited.error else _last_line(exited)
        return "refused", f"the trainer refused its configuration: {words}", ""
    if exited.error is not None:
        words = f"{exited.error.error}: {exited.error.message}"
        where = f"{words} at step {exited.error.step}"
        if exited.exit_code == exits.UNSTABLE:
            first = f"(rank {exited.rank} said so first)"
            return "exception", f"all ranks came to the same: {words} {first}", where
        return "exception", f"rank {exited.rank} raised {where}", where
    if exited.signal is not None:
        cause = f"rank {exited.rank} was killed by {signal_name(exited.signal)}"
        return "rank-killed", cause, ""
    if exited.exit_code == exits.CHECKPOINTED:
        cause = f"rank {exited.rank} was told by a signal from outside to checkpoint and leave"
        return "rank-stopped", cause, ""
    if exited.exit_code is None:
        return "rank-lost", f"rank {exited.rank} vanished together with its launcher", ""
    if exited.exit_code == exits.UNSTABLE:
        cause = f"all ranks left with exit code {exits.UNSTABLE} (rank {exited.rank} first)"
        return "rank-exited", cause, ""
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


def broken_hosts(findings: Findings, own: tuple[FailureRule, ...]) -> dict[str, Classified]:
    """Host -> what its kernel said of broken hardware while the attempt ran."""
    return {
        host: first
        for host, said in kernel_words(findings, own).items()
        if (first := next((one for one in said if one.rule.scope == "host"), None))
    }


def kernel_words(
    findings: Findings, own: tuple[FailureRule, ...]
) -> dict[str, tuple[Classified, ...]]:
    """Host -> what its kernel said, by class. What the kernels of several hosts tell of network or
    storage lies between them, and is none of theirs."""
    said = {part.host: part.kernel for part in findings.evidence if part.kernel}
    found = {host: _classes_of(lines, own) for host, lines in said.items()}
    times = Counter(one.rule.name for all_of_it in found.values() for one in all_of_it)
    return {
        host: tuple(
            one for one in all_of_it if one.rule.scope not in SHARED or times[one.rule.name] == 1
        )
        for host, all_of_it in found.items()
    }


@lru_cache(maxsize=1024)
def _classes_of(lines: tuple[str, ...], own: tuple[FailureRule, ...]) -> tuple[Classified, ...]:
    """The first of each class, in the order of the rules."""
    first: dict[str, Classified] = {}
    for rule in (*own, *default_rules()):
        one = fit(rule, Signs(lines=lines))
        if one is not None:
            first.setdefault(rule.name, one)
    return tuple(first.values())


def told_by_kernel(
    said: tuple[Classified, ...], exited: RankExited, own: tuple[FailureRule, ...]
) -> Classified | None:
    """What the kernel says of this end, if it is not the rank that knows better.

    Pids are not compared: the kernel's are those of the host, and a rank's those of its container.
    """
    rank = failure_of(exited, own)
    return next((one for one in said if _explains(one.rule, exited, rank, own)), None)


def _explains(
    rule: FailureRule, exited: RankExited, rank: Classified | None, own: tuple[FailureRule, ...]
) -> bool:
    asked_to_leave = _ended_by(exited) == "SIGTERM"
    if rule.scope == "host" or rule in own:
        own_fault = rank is not None and rank.rule.scope == "user"
        another = own_fault or (asked_to_leave and rule not in own)
        return rule.action == "replace" or not another
    if rule.name == OUT_OF_MEMORY:
        return exited.signal == signal.SIGKILL
    if rule.symptom or rule.action == "stop" or asked_to_leave:
        return False
    if rank is None or not rank.line:
        return rule.scope not in SHARED or exited.signal not in CRASHES
    return rank.rule.symptom and rule.scope in SHARED

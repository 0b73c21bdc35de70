"""What one exit, or one line of a kernel, means: kind, class, words."""

import signal
from collections import Counter
from dataclasses import dataclass, replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.spec.failures import Reading, Scope
from orchestrator.diagnosis.logs.readings import (
    BY_SHELL,
    EARLY,
    OUT_OF_MEMORY,
    is_broken_hardware,
    kind_of,
    signal_name,
)
from orchestrator.job.findings import Findings
from orchestrator.job.incident import NOBODY, Culprit, Evidence

FIX = "\n  fix: "
"""Before the fix, in the words of an error of ours (`NdctlError`)."""
SHARED: tuple[Scope, ...] = ("fabric", "storage")
CRASHES = frozenset({signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
"""What neither a network nor a file system ends a process by; by SIGBUS that it had mapped."""


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
    failure: Reading | None = None
    """The failure's class."""
    phase: Phase | None = None
    """In which it happened, where that is known."""
    confidence: float | None = None
    """Of what was weighed; None: it was seen."""
    drill: str | None = None
    """The drill that made it happen."""
    fix: str = ""
    """What to do about this very one, where that is known better than of its class."""


def exited_verdict(exited: RankExited, hardware: Reading | None) -> Verdict:
    who = Culprit(host=exited.host, rank=exited.rank)
    found = hardware or failure_of(exited)
    seen = (f"the kernel of {exited.host}: {hardware.line}",) if hardware else ()
    evidence = Evidence(
        exit_code=exited.exit_code,
        signal=signal_name(exited.signal),
        log_tail=exited.log_tail,
        traceback=exited.error.traceback if exited.error else "",
        notes=(*seen, *class_notes(found)),
    )
    if exited.above in ("torchrun", "launcher"):
        who = Culprit(host=exited.host)  # which has one for all of its ranks
    kind, cause, signature = name_of(exited)
    if hardware is not None:
        # The program did not do it, so a second time would not be the program's own either.
        cause, signature = f"{hardware.name} on {exited.host}; {cause}", ""
    elif exited.exit_code == exit_codes.REFUSED:
        # Every rank refuses the same configuration: which one is heard first is chance. Where in
        # our code it was noticed, and the log that says it again, tell a person nothing.
        who, evidence = NOBODY, replace(evidence, log_tail=(), traceback="", notes=())
    elif exited.exit_code == exit_codes.UNSTABLE:
        who = NOBODY  # all ranks have the same totals: who is the first to leave is chance
    return Verdict(
        kind=kind,
        cause=cause,
        culprit=who,
        at=exited.at,
        detected_after_s=exited.detected_after_s,
        evidence=evidence,
        signature=signature,
        final=exited.exit_code == exit_codes.REFUSED,
        failure=found,
        phase=exited.phase,
        fix=_fix_of(exited) if exited.exit_code == exit_codes.REFUSED else "",
    )


def _fix_of(exited: RankExited) -> str:
    """What the trainer says to do, which stands behind its message."""
    return exited.error.message.partition(FIX)[2].strip() if exited.error else ""


def failure_of(exited: RankExited) -> Reading | None:
    """The class of what ended a rank, as it was read on its host; None: nobody did, or it has
    none."""
    return exited.reading.failure if exited.reading else None


def breaks_its_host(exited: RankExited) -> bool:
    """Whether a rank says of its host's hardware what nothing but that can make it say."""
    found = failure_of(exited)
    return found is not None and is_broken_hardware(found)


def asked_to_leave(exited: RankExited) -> bool:
    return exited.exit_code == exit_codes.CHECKPOINTED or exited.signal == signal.SIGTERM


def class_notes(found: Reading | None) -> tuple[str, ...]:
    if found is None:
        return ()
    return (f"class {found.name} (scope {found.scope}): {found.advice}",)


def name_of(exited: RankExited) -> tuple[str, str, str]:
    """Kind, cause and signature of one exit."""
    kind = kind_of(exited.exit_code, exited.signal, raised=exited.error is not None)
    cause, signature = _cause(kind, exited)
    return kind, cause, signature


def _cause(kind: str, exited: RankExited) -> tuple[str, str]:
    unstable = exited.exit_code == exit_codes.UNSTABLE
    if kind == "refused":
        words = exited.error.message.partition(FIX)[0] if exited.error else _last_line(exited)
        return f"the trainer refused its configuration: {words}", ""
    if kind == EARLY:
        return f"rank {exited.rank} ended with exit code 0 after step {exited.step}", ""
    if exited.error is not None:
        words = f"{exited.error.error}: {exited.error.message}"
        where = f"{words} at step {exited.error.step}"
        if unstable:
            first = f"(rank {exited.rank} said so first)"
            return f"all ranks came to the same: {words} {first}", where
        return f"rank {exited.rank} raised {where}", where
    if exited.above is not None:
        what = f"the {exited.above} of rank {exited.rank}"
        return f"{what} was killed by {signal_name(exited.signal)}", ""
    if kind == "rank-killed":
        return f"rank {exited.rank} was killed by {signal_name(exited.signal)}", ""
    if kind == "rank-stopped":
        return f"rank {exited.rank} was told by a signal from outside to checkpoint and leave", ""
    if kind == "rank-lost":
        return f"rank {exited.rank} vanished together with its keeper", ""
    if unstable:
        return f"all ranks left with exit code {exit_codes.UNSTABLE} (rank {exited.rank} first)", ""
    return f"rank {exited.rank} left with exit code {exited.exit_code}", ""


def _last_line(exited: RankExited) -> str:
    return exited.log_tail[-1] if exited.log_tail else "see its log"


def broken_hosts(findings: Findings) -> dict[str, Reading]:
    """Host -> what its kernel said of broken hardware while the attempt ran."""
    return {
        host: first
        for host, said in kernel_words(findings).items()
        if (first := next((one for one in said if one.scope == "host"), None))
    }


def kernel_words(findings: Findings) -> dict[str, tuple[Reading, ...]]:
    """Host -> what its kernel said, by class. What the kernels of several hosts tell of network or
    storage lies between them, and is none of theirs."""
    found = {part.host: part.readings for part in findings.evidence if part.kernel}
    times = Counter(one.name for all_of_it in found.values() for one in all_of_it)
    return {
        host: tuple(one for one in all_of_it if one.scope not in SHARED or times[one.name] == 1)
        for host, all_of_it in found.items()
    }


def told_by_kernel(said: tuple[Reading, ...], exited: RankExited) -> Reading | None:
    """What the kernel says of this end, if it is not the rank that knows better.

    Pids are not compared: the kernel's are those of the host, and a rank's those of its container.
    """
    rank = failure_of(exited)
    return next((one for one in said if _explains(one, exited, rank)), None)


def _explains(said: Reading, exited: RankExited, rank: Reading | None) -> bool:
    asked = asked_to_leave(exited)
    if said.scope == "host" or said.own:
        own_fault = rank is not None and rank.scope == "user"
        another = own_fault or (asked and not said.own)
        return said.action == "replace" or not another
    if said.name == OUT_OF_MEMORY:
        asked_first = exited.signal == signal.SIGTERM and "SIGTERM" in said.line  # earlyoom
        killed = exited.signal == signal.SIGKILL
        return killed or asked_first or exited.exit_code == BY_SHELL + signal.SIGKILL
    if said.symptom or said.action == "stop" or asked:
        return False
    if rank is None or not rank.line:
        return said.scope not in SHARED or exited.signal not in CRASHES
    return rank.symptom and said.scope in SHARED

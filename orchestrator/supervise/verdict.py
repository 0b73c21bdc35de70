"""What one exit, or one line of a kernel, means: kind, class, words."""

import signal
from dataclasses import dataclass, replace
from functools import lru_cache

from orchestrator.contract import exits
from orchestrator.contract.events import RankExited
from orchestrator.contract.failures import FailureRule
from orchestrator.contract.phases import Phase
from orchestrator.diagnosis.classes import Classified, Signs, classify
from orchestrator.supervise.state import Culprit, Evidence, Findings


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
        kind=name_of(exited)[0],
        phase=exited.phase,
    )
    if exited.error is not None:
        raised = f"{exited.error.error}: {exited.error.message}".splitlines()
        signs = replace(signs, lines=tuple(raised))
    return classify(signs, own)


def class_notes(found: Classified | None) -> tuple[str, ...]:
    if found is None:
        return ()
    rule = found.rule
    return (f"class {rule.name} (scope {rule.scope}): {rule.advice}",)


def name_of(exited: RankExited) -> tuple[str, str, str]:
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


def broken_hosts(findings: Findings, own: tuple[FailureRule, ...]) -> dict[str, Classified]:
    """Host -> what its kernel said of broken hardware while the attempt ran."""
    said = {part.host: part.kernel for part in findings.evidence if part.kernel}
    found = {host: classify(Signs(lines=lines), own) for host, lines in said.items()}
    return {host: one for host, one in found.items() if one is not None}


def of_hardware(kernel: Classified | None, rank: Classified | None) -> Classified | None:
    """What the kernel says, unless it is harmless and the rank itself says that it is its own."""
    if kernel is None:
        return None
    own_fault = rank is not None and rank.rule.scope == "user"
    return None if own_fault and kernel.rule.action != "replace" else kernel

"""An incident: what went wrong once, who caused it, and what was done about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.spec.failures import Remedy, Scope
from orchestrator.host_strikes import MOST_EVIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Who caused an incident; None where it is not known, or nobody did."""

    host: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return self.host or "nobody"
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else ", but no host")


NOBODY = Culprit()


PREFLIGHT = "preflight"
"""Kind of the incident of a host that was found wanting before ranks started on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    exit_code: int | None = None
    signal: str | None = None
    log_tail: tuple[str, ...] = ()
    traceback: str = ""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank to its stack at a hang."""
    notes: tuple[str, ...] = ()
    """How the cause is known, and what evidence is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What went wrong once, and what came of it."""

    id: int
    attempt: int
    at: float
    """When it happened, as near as is known."""
    kind: str
    cause: str
    culprit: Culprit
    evidence: Evidence
    action: str
    """What ndctl did about it."""
    step: int
    """The last step known to be done."""
    saved: int | None = None
    """Newest complete checkpoint's step then, and the one that the next attempt went on from once
    that is known: the steps since are made again. None where no rank ran, so that none are."""
    signature: str = ""
    """Exception, message and step: two incidents that share it are the program's own error."""
    detected_after_s: float
    recovered_after_s: float | None = None
    """From `at` to the first new step of a later attempt; None while that has not come."""
    drill: str | None = None
    """The drill that made it happen."""
    failure: str = ""
    """Its class."""
    scope: Scope = "rank"
    phase: Phase | None = None
    remedy: Remedy | None = None
    """What was decided; None where a person decided."""
    rule: str = ""
    """Of the policy, which decided."""
    advice: str = ""
    """What a person should do about it."""
    edits: tuple[str, ...] = ()
    """Each a way to go on that does not meet it again, the best first: what is typed behind
    `ndctl submit SPEC --resume`."""
    confidence: float | None = None
    """0 to 1, of a verdict that was weighed; None: what is said was seen."""


def evidence_lines(incident: Incident) -> tuple[str, ...]:
    """What shows it, in a few lines: how it is known, and the end of the log."""
    found = incident.evidence
    left = MOST_EVIDENCE - len(found.notes[:MOST_EVIDENCE])
    tail = found.log_tail[-left:] if left else ()
    return (*found.notes[:MOST_EVIDENCE], *tail)

"""What a failure was and who caused it."""

from collections.abc import Mapping

from msgspec import Struct, field

from ndctl.rank.phases import Phase
from orchestrator.contract.spec.failures import Reading


class Culprit(Struct, frozen=True, kw_only=True):
    """The host and the rank that caused a failure. A field is None where that is not known, or
    where no host or rank caused it."""

    host: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return self.host or "nobody"
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else ", but no host")


NOBODY = Culprit()
"""No culprit."""


class Evidence(Struct, frozen=True, kw_only=True):
    rank: int | None = None
    """The rank that exit code, signal, log and traceback are of. It need not be the culprit: peers
    of a rank that ended first fail, and may say more. None where that is not known."""
    ended: Culprit | None = None
    """A rank that ended before the others, if no single rank is the culprit: its log may tell why.
    """
    exit_code: int | None = None
    signal: str | None = None
    log_tail: tuple[str, ...] = ()
    traceback: str = ""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rank to its stack at a hang."""
    notes: tuple[str, ...] = ()
    """How the cause is known, and what evidence is missing."""


def named_cause(cause: str, culprit: Culprit) -> str:
    """The cause with the host of its rank: `rank 1 on host-1 exited with code 3`."""
    rank = f"rank {culprit.rank} "
    if culprit.rank is None or culprit.host is None or not cause.startswith(rank):
        return cause
    return f"{culprit} {cause.removeprefix(rank)}"


class Verdict(Struct, frozen=True, kw_only=True):
    """The first cause of a failure, or what one sign would mean if it were the first cause."""

    kind: str
    cause: str
    culprit: Culprit
    at: float
    """When it happened, as near as is known."""
    detected_after_s: float
    evidence: Evidence
    signature: str = ""
    """Exception, message and step: two failures with the same one are a bug of the program."""
    final: bool = False
    """A restart cannot help."""
    failure: Reading | None = None
    """The failure class."""
    phase: Phase | None = None
    """The phase in which it happened; None where that is not known."""
    confidence: float | None = None
    """0 to 1 where evidence was weighed; None where the cause was seen."""
    drill: str | None = None
    """The drill that caused it."""
    fix: str = ""
    """What to do, where that is known better than from the class."""

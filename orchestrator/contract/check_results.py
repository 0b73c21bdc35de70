"""What a check of a machine found: of `ndctl doctor`, and of each host before ranks start on it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "warns", "stops"]
BEFORE_HOOK = "before hook"
"""What of a host on which the spec's own line of shell failed before its agent began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    verdict: Verdict
    """`stops`: a job cannot run; `warns`: it may suffer; `note`: for information."""
    found: str
    fix: str = ""


def why_unfit(findings: Iterable[Finding]) -> str | None:
    """Why no rank may start on a host that found this of itself, and what would mend it; None
    where one may."""
    return "; ".join(_words(found) for found in findings if found.verdict == "stops") or None


def _words(found: Finding) -> str:
    return f"{found.what}: {found.found}" + (f" ({found.fix})" if found.fix else "")


def words_of_finding(found: Finding) -> str:
    """As one text, with its fix on a line of its own."""
    fix = f"\n  fix: {found.fix}" if found.fix and found.verdict in ("warns", "stops") else ""
    return f"{found.what}: {found.found}{fix}"


def troubles(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that somebody has to see."""
    return tuple(found for found in findings if found.verdict in ("warns", "stops"))

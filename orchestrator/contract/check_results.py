"""Results of the checks of a host, by `ndctl doctor` or before ranks start on the host."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Verdict = Literal["ok", "note", "warns", "stops"]
BEFORE_HOOK = "before hook"
"""Value of `Finding.what` for a host on which the spec's `hooks.before` failed."""


class Finding(Struct, frozen=True, kw_only=True):
    what: str
    verdict: Verdict
    """`stops`: a job cannot run; `warns`: it may run badly; `note`: information only."""
    found: str
    fix: str = ""


def why_unfit(findings: Iterable[Finding]) -> str | None:
    """The findings that forbid ranks on a host, each with its fix; None if ranks may start."""
    return "; ".join(_words(found) for found in findings if found.verdict == "stops") or None


def _words(found: Finding) -> str:
    return f"{found.what}: {found.found}" + (f" ({found.fix})" if found.fix else "")


def words_of_finding(found: Finding) -> str:
    """One text. A fix that the user should apply has a line of its own."""
    fix = f"\n  fix: {found.fix}" if found.fix and found.verdict in ("warns", "stops") else ""
    return f"{found.what}: {found.found}{fix}"


def troubles(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that a user must see."""
    return tuple(found for found in findings if found.verdict in ("warns", "stops"))

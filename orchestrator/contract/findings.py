"""What a check of a machine found: of `ndctl doctor`, and of each host before ranks start on it."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "warns", "stops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    verdict: Verdict
    """`stops`: a job cannot run; `warns`: it may suffer; `note`: for information."""
    found: str
    fix: str = ""

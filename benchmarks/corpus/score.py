"""What ndctl says of a case of the corpus, and how right that is."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.corpus.cases import Case, DumpCase
from orchestrator.app.classification import Classification, classify_log
from orchestrator.app.diagnose_job import diagnose_folder
from orchestrator.diagnosis.hang.verdicts import Diagnosis
from orchestrator.errors import NdctlError

UNKNOWN = "unknown"
"""What a case calls the class where nothing is known."""


class Grade(StrEnum):
    RIGHT = "right"
    GENERIC = "generic"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    file: str
    grade: Grade
    expected: str
    got: str
    line: str | None = None
    """Which line of the log decided."""
    broken: bool = False
    healthy: bool = False
    missed: bool = False
    excluded: bool = False
    """Of dumps: a rank was named that is not to blame."""


def grade(case: Case, found: Classification) -> Grade:
    name = found.class_ or UNKNOWN
    # Where nothing is known there is no scope either, which is not a second mistake.
    placed = found.scope is None or found.scope in case.scopes
    if placed and _is_any(name, case.accepts):
        return Grade.RIGHT
    return Grade.GENERIC if _is_any(name, case.generic) else Grade.WRONG


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def outcome(case: Case, found: Classification) -> Outcome:
    scopes = "|".join(case.scopes)
    broken, healthy = case.excludes_host is True, case.excludes_host is False
    return Outcome(
        name=case.name,
        file=case.file,
        grade=grade(case, found),
        expected=f"{case.accepts[0]} ({scopes}{', excludes' if broken else ''})",
        got=f"{found.class_} ({found.scope}{', excludes' if found.excludes_host else ''})",
        line=found.line,
        broken=broken,
        healthy=healthy,
        missed=broken and not found.excludes_host,
        excluded=healthy and found.excludes_host,
    )


def dump_outcome(case: DumpCase, found: Diagnosis | NdctlError) -> Outcome:
    """An error is wrong, and names nobody."""
    kind = found.kind if isinstance(found, Diagnosis) else "error"
    named = frozenset(found.ranks if isinstance(found, Diagnosis) else ())
    enough = named == case.culprits or (case.or_none and not named)
    if enough and _is_any(kind, case.kinds):
        reached = Grade.RIGHT
    elif named <= case.culprits and isinstance(found, Diagnosis):
        reached = Grade.GENERIC  # not all of them, or another reason: nobody who is healthy
    else:
        reached = Grade.WRONG
    return Outcome(
        name=case.name,
        file="dumps/cases.yaml",
        grade=reached,
        expected=f"{sorted(case.culprits)} {'|'.join(case.kinds)}",
        got=f"{sorted(named)} {kind}",
        line=None if isinstance(found, Diagnosis) else str(found).splitlines()[0],
        excluded=bool(named - case.culprits),
    )


def run_cases(cases: Iterable[Case]) -> list[Outcome]:
    return [
        outcome(
            case,
            classify_log(
                case.log, kernel=case.kernel, exit_code=case.exit_code, signal=case.signal
            ),
        )
        for case in cases
    ]


def run_dump_cases(cases: Iterable[DumpCase]) -> list[Outcome]:
    return [dump_outcome(case, _diagnosed(case.folder)) for case in cases]


def _diagnosed(folder: Path) -> Diagnosis | NdctlError:
    try:
        return diagnose_folder(folder)[1]
    except NdctlError as exc:
        return exc

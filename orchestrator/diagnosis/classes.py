"""The class of a failure, by ordered rules: the first that fits wins, a user's before ours."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orchestrator.contract.failures import FailureRule
from orchestrator.contract.phases import Phase

TABLE = Path(__file__).with_name("classes.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What one process, or the kernel of its host, left behind."""

    lines: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: str | None = None
    kind: str | None = None
    """Of the incident, by how it was seen."""
    phase: Phase | None = None
    """None: not known, which fits every rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classified:
    rule: FailureRule
    line: str
    """The line that gave it away; empty where it was a signal or an exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    classes: tuple[FailureRule, ...]


def classify(
    signs: Signs, own: Sequence[FailureRule] = (), rules: Sequence[FailureRule] | None = None
) -> Classified | None:
    """The first rule that fits; None: this is not known. `rules`: after `own`, instead of ours."""
    for rule in (*own, *(default_rules() if rules is None else rules)):
        found = fit(rule, signs)
        if found is not None:
            return found
    return None


def fit(rule: FailureRule, signs: Signs) -> Classified | None:
    if rule.phases and signs.phase is not None and signs.phase not in rule.phases:
        return None
    if rule.signals and signs.signal not in rule.signals:
        return None
    if rule.kinds and signs.kind not in rule.kinds:
        return None
    if rule.exit_codes and signs.exit_code not in rule.exit_codes:
        return None
    if not rule.patterns:
        return Classified(rule=rule, line="")
    line = _first_line(rule.patterns, signs.lines)
    return None if line is None else Classified(rule=rule, line=line)


def _first_line(patterns: tuple[str, ...], lines: Iterable[str]) -> str | None:
    search = _compiled(patterns).search
    return next((line for line in lines if search(line)), None)


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


@cache
def default_rules() -> tuple[FailureRule, ...]:
    """Ours; read when first needed, since most commands need none."""
    from orchestrator.document import decode_document, parse, read_text

    document = parse(read_text(TABLE, "it comes with ndctl"), str(TABLE))
    return decode_document(_Table, document).classes

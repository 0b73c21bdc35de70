"""The class of a failure, by ordered rules: the first that fits wins, a user's before ours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.spec.failures import FailureRule, Reading
from orchestrator.diagnosis.logs.patterns import Text, compiled, which
from orchestrator.diagnosis.logs.xids import xid_rules

TABLE = Path(__file__).with_name("classes.yaml")
GUESSES = (
    r"\bit is possible (that|for)\b",
    r"\b(potential|possible|common|likely) (root )?(causes?|reasons?)\b",
    r"\b(might|may|could|can) (also )?(be|have been|happen|occur|mean|indicate)\b",
    r"\b(possibly|probably|perhaps|maybe|likely|typically) (due|because|caused|from|an?|the)\b",
    r"\b(usually|often|normally|generally) (means?|caused|happens?|indicates?|reflects?|due)\b",
    r"\bplease (try|check|make sure|ensure|verify|see|refer|consider)\b",
    r"\bmake sure (that|you|the)\b",
)
"""Where a message begins to guess at its cause, or to advise: `It is possible that workers are out
of shared memory`, `potential root causes: (1) killed by the OOM killer`."""
PIECE = 50
"""Lines that are read together, of a log that is read whole: fewer than a `Text` would leave out,
however long they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What one process, or the kernel of its host, left behind."""

    lines: tuple[str, ...] = ()
    said: Text | None = None
    """The same, where that is made already."""
    exit_code: int | None = None
    signal: str | None = None
    kind: str | None = None
    """Of the incident, by how it was seen."""
    phase: Phase | None = None
    """None: not known, which fits every rule."""

    @property
    def text(self) -> Text:
        return Text.of(self.lines) if self.said is None else self.said


@dataclass(frozen=True, slots=True, kw_only=True)
class Classified:
    rule: FailureRule
    line: str
    """The line that gave it away; empty where it was a signal or an exit code."""
    pattern: str = ""
    """The one that was found in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """In the order in which rules are tried."""

    classes: tuple[FailureRule, ...]
    """Whose words are known."""
    families: tuple[FailureRule, ...]
    """What tells no more than which part of the software speaks."""
    symptoms: tuple[FailureRule, ...]
    ends: tuple[FailureRule, ...]
    """How a process ended, and what was seen of an incident."""


def classify(
    signs: Signs, own: Sequence[FailureRule] = (), rules: Sequence[FailureRule] | None = None
) -> Classified | None:
    """The first rule that fits; None: this is not known. `rules`: after `own`, instead of ours."""
    text = signs.text
    # What a program guesses decides no rule of ours; a user may have a class for the very guess.
    stated = text.cut_before(GUESSES)
    ours = default_rules() if rules is None else rules
    fits = chain(
        (_fit(rule, signs, text) for rule in own), (_fit(rule, signs, stated) for rule in ours)
    )
    return next((found for found in fits if found is not None), None)


def all_that_fit(signs: Signs, rules: Sequence[FailureRule]) -> tuple[Classified, ...]:
    """In the order of the rules."""
    text = signs.text
    found = (_fit(rule, signs, text) for rule in rules)
    return tuple(one for one in found if one is not None)


def fit(rule: FailureRule, signs: Signs) -> Classified | None:
    return _fit(rule, signs, signs.text)


def _fit(rule: FailureRule, signs: Signs, text: Text) -> Classified | None:
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
    for number in text.numbers(rule.patterns):
        line = text.line(number)
        if not (rule.unless and compiled(rule.unless).search(line)):
            pattern = which(rule.patterns, line)
            return Classified(rule=rule, line=text.lines[number], pattern=pattern)
    return None


def with_class(lines: Sequence[str], own: Sequence[FailureRule] = ()) -> Iterator[str]:
    """Those that may have a class, of however many: all rules look through many lines at once."""
    rules = [rule for rule in (*own, *default_rules()) if rule.patterns]
    for begin in range(0, len(lines), PIECE):
        text = Text.of(lines[begin : begin + PIECE])
        numbers = {number for rule in rules for number in text.numbers(rule.patterns)}
        yield from (text.lines[number] for number in sorted(numbers))


def reading_of(found: Classified | None, own: Sequence[FailureRule] = ()) -> Reading | None:
    """As it is kept."""
    if found is None:
        return None
    rule = found.rule
    return Reading(
        name=rule.name,
        scope=rule.scope,
        action=rule.action,
        advice=rule.advice,
        symptom=rule.symptom,
        own=rule in own,
        line=found.line,
        pattern=found.pattern,
    )


@cache
def default_rules() -> tuple[FailureRule, ...]:
    """Ours; read when first needed, since most commands need none."""
    table = _table()
    first, *rest = table.classes
    # What a driver says by number stands before all words.
    return (first, *xid_rules(), *rest, *table.families, *table.symptoms, *table.ends)


def families() -> tuple[FailureRule, ...]:
    """Those of ours that say the least of all that say why a rank ended."""
    return _table().families


@cache
def _table() -> _Table:
    from orchestrator.yaml_document import decode_document, parse, read_text

    return decode_document(_Table, parse(read_text(TABLE, "it comes with ndctl"), str(TABLE)))

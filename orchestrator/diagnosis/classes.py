"""Finds the class of a failure with ordered rules: the first match wins, user rules come first."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from msgspec import Struct

from ndctl.rank.phases import Phase
from orchestrator.contract.files import exit_codes
from orchestrator.contract.spec.failures import FailureRule, Reading
from orchestrator.diagnosis.logs.patterns import Text, compiled, pieces, which
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
"""Patterns after which a message only guesses at its cause or gives advice: `It is possible that
workers are out of shared memory`, `potential root causes: (1) killed by the OOM killer`."""


class FailureSigns(Struct, frozen=True, kw_only=True):
    """Evidence from one process, or from the kernel log of its host."""

    lines: tuple[str, ...] = ()
    said: Text | None = None
    """`lines` as a `Text`, if the caller already has it."""
    exit_code: int | None = None
    signal: str | None = None
    kind: str | None = None
    """Kind of the incident, for example `rank-killed`."""
    phase: Phase | None = None
    """None: unknown, which matches every rule."""

    @property
    def text(self) -> Text:
        return Text.of(self.lines) if self.said is None else self.said


class Classified(Struct, frozen=True, kw_only=True):
    rule: FailureRule
    line: str
    """The matching line; empty if a signal or exit code matched."""
    pattern: str = ""
    """The pattern that matched `line`."""


class _Table(Struct, frozen=True, kw_only=True):
    """The rules of `classes.yaml`, in the order in which they are tried."""

    classes: tuple[FailureRule, ...]
    """Rules for messages that name a cause."""
    families: tuple[FailureRule, ...]
    """Rules for messages that only show which component failed."""
    symptoms: tuple[FailureRule, ...]
    """Rules for messages about a lost peer, which is rarely the root cause."""
    ends: tuple[FailureRule, ...]
    """Rules for exit codes, signals and kinds of incident."""


def classify(
    signs: FailureSigns, own: Sequence[FailureRule] = (), rules: Sequence[FailureRule] | None = None
) -> Classified | None:
    """The first matching rule, or None.

    Args:
        own: rules of the user, tried first.
        rules: tried next, in place of the default rules.
    """
    text = signs.text
    # The default rules ignore guesses in a message. A user's rule may match a guess on purpose.
    stated = text.cut_before(GUESSES)
    ours = default_rules() if rules is None else rules
    fits = chain(
        (_fit(rule, signs, text) for rule in own), (_fit(rule, signs, stated) for rule in ours)
    )
    return next((found for found in fits if found is not None), None)


def all_that_fit(signs: FailureSigns, rules: Sequence[FailureRule]) -> tuple[Classified, ...]:
    """All matching rules, in order."""
    text = signs.text
    found = (_fit(rule, signs, text) for rule in rules)
    return tuple(one for one in found if one is not None)


def _fit(rule: FailureRule, signs: FailureSigns, text: Text) -> Classified | None:
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
    """The lines that match a pattern of any rule."""
    rules = [rule for rule in (*own, *default_rules()) if rule.patterns]
    for piece in pieces(lines):
        text = Text.of(piece)
        numbers = {number for rule in rules for number in text.numbers(rule.patterns)}
        yield from (text.lines[number] for number in sorted(numbers))


def reading_of(found: Classified | None, own: Sequence[FailureRule] = ()) -> Reading | None:
    """The form in which a class is written to the journal."""
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
    """The rules that come with ndctl; loaded at first use, because most commands need none."""
    table = _table()
    # A trainer that refuses to start says why. After that come Xid numbers of the driver, which are
    # more reliable than the text of messages.
    refusals = tuple(rule for rule in table.classes if exit_codes.REFUSED in rule.exit_codes)
    rest = table.classes[len(refusals) :]
    return (*refusals, *xid_rules(), *rest, *table.families, *table.symptoms, *table.ends)


def families() -> tuple[FailureRule, ...]:
    """The default rules that only show which component failed."""
    return _table().families


@cache
def _table() -> _Table:
    from orchestrator.yaml_document import decode_document, parse, read_text

    return decode_document(_Table, parse(read_text(TABLE, "it comes with ndctl"), str(TABLE)))

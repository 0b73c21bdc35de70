"""What ndctl would do about a failure, and which rules say so: `ndctl policy`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.contract.codec import encode, nearest
from orchestrator.contract.spec.failures import FailureRule, Remedy
from orchestrator.contract.spec.job_spec import ResilienceSpec
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.diagnosis.classes import Signs, classify
from orchestrator.diagnosis.classes import default_rules as default_classes
from orchestrator.errors import SpecError
from orchestrator.job import policy
from orchestrator.load import read_spec

XID = re.compile(r"(?:xid)?[-_ ]?(\d+)", re.IGNORECASE)

REMEDIES: dict[Remedy, str] = {
    "restart": "restart in place",
    "replace": "restart without the host: a spare, else fewer hosts where resilience.shrink allows"
    " it, else the queue",
    "requeue": "give the hosts back, and queue again",
    "replan": "restart with a plan that takes less memory",
    "rollback": "restart from one checkpoint back, without the data since",
    "stop": "stop, with the advice",
}
SAME = {
    "class": "of its class",
    "host": "of its class on one host",
    "strike": "that is a strike against one host, of whatever class,",
    "error": "with the same error at the same step",
    "checkpoint": "of its class without a new checkpoint in between",
    "start": "in a row without a step in between",
    "any": "that the rule covers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Of one spec, or ndctl's own."""

    classes: tuple[FailureRule, ...]
    rules: tuple[PolicyRule, ...]
    max_restarts: int
    max_allocations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What becomes of failures of one class."""

    name: str
    classes: tuple[FailureRule, ...]
    """The rules that lead to the class."""
    rules: tuple[PolicyRule, ...]
    """Those that may decide, in order; the last one always can."""
    max_restarts: int
    max_allocations: int


def policy_of(spec: str | None, overrides: Sequence[str] = ()) -> Policy:
    resilience = read_spec(Path(spec), overrides).resilience if spec else ResilienceSpec()
    # On what devices it will train, the spec alone does not say.
    chosen = policy.options(resilience.on_oom, resilience.on_nan, on_processors=True)
    return Policy(
        classes=(*resilience.failure_classes, *default_classes()),
        rules=(*resilience.policy, *chosen, *policy.default_rules()),
        max_restarts=resilience.max_restarts,
        max_allocations=resilience.max_allocations,
    )


def explain(name: str, found: Policy) -> Explained:
    """Of a class, by its name, the beginning of its name, or the number of an Xid.

    Raises SpecError where there is no such class, or several.
    """
    names = list(dict.fromkeys(rule.name for rule in found.classes))
    if name not in names:
        name = _meant(name, names, found)
    classes = tuple(rule for rule in found.classes if rule.name == name)
    rules = [rule for rule, _ in _met(found.rules, classes)]
    return Explained(
        name=name,
        classes=classes,
        rules=tuple(rules),
        max_restarts=found.max_restarts,
        max_allocations=found.max_allocations,
    )


def _met(
    rules: Sequence[PolicyRule], entries: Sequence[FailureRule]
) -> Iterator[tuple[PolicyRule, list[FailureRule]]]:
    """The rules that may decide, each with those of a class's entries of which it may."""
    undecided = list(entries)
    for rule in rules:
        if fitting := [one for one in undecided if _fits(rule, one)]:
            yield rule, fitting
        if _always(rule):
            undecided = [one for one in undecided if one not in fitting]


def _meant(said: str, names: Sequence[str], found: Policy) -> str:
    begun = [name for name in names if name.startswith(f"{said}-")]
    if len(begun) == 1:
        return begun[0]
    if xid := XID.fullmatch(said):
        lines = (
            f"NVRM: Xid (PCI:0000:01:00): {xid[1]}, {rest}" for rest in ("pid=1", "NETIR Fatal")
        )
        known = classify(Signs(lines=tuple(lines)), found.classes)
        if known is not None:
            return known.rule.name
    near = ", ".join(begun) or nearest(said, names)
    guess = f"did you mean {near}? " if near else ""
    raise SpecError(
        f"there is no failure class {said}",
        fix=f"{guess}`ndctl policy` lists the classes; a spec adds its own with"
        " resilience.failure_classes",
    )


def _fits(rule: PolicyRule, one: FailureRule) -> bool:
    said = not rule.says or one.action in rule.says
    return said and rule.concerns(one.name, one.scope)


def _always(rule: PolicyRule) -> bool:
    return rule.times == 1 and not rule.phases and rule.name != policy.OF_PROCESSORS


def explained_json(found: Explained) -> dict[str, Any]:
    body: dict[str, Any] = encode(found)
    return body


def explained_text(found: Explained) -> str:
    return "\n".join(_explained(found))


def _explained(found: Explained) -> Iterator[str]:
    first = found.classes[0]
    ways = list(dict.fromkeys(map(_way, found.classes)))
    yield f"{found.name}: {'; or '.join(ways)}"
    yield f"  advice   {first.advice or 'none'}"
    for one in found.classes:
        which = f" ({_way(one)})" if len(ways) > 1 else ""
        yield f"  known by {'; '.join(_signs(one))}{which}"
    yield "Rules that may decide; the first that fits does:"
    width = max(len(rule.name) for rule in found.rules)
    for number, (rule, fitting) in enumerate(_met(found.rules, found.classes), 1):
        met = list(dict.fromkeys(map(_way, fitting)))
        of = f" of {'; or '.join(met)}" if len(met) < len(ways) else ""
        said = dict.fromkeys(
            one.action if rule.action == "class" else rule.action for one in fitting
        )
        does = "; or ".join(REMEDIES[action] for action in said)
        yield f"  {number} {rule.name:<{width}}  {when(rule)}{of}: {does}{waits(rule)}"
        if rule.why:
            yield f"    {'':<{width}}  {rule.why}"
    yield budget(found)


def _way(one: FailureRule) -> str:
    """Entries of one class may differ in that."""
    return f"scope {one.scope}, by itself {one.action}"


def _signs(rule: FailureRule) -> Iterator[str]:
    if rule.kinds:
        yield f"incidents of kind {', '.join(rule.kinds)}"
    if rule.signals:
        yield f"signal {', '.join(rule.signals)}"
    if rule.exit_codes:
        yield f"exit code {', '.join(map(str, rule.exit_codes))}"
    if rule.patterns:
        yield f"lines like {'  '.join(rule.patterns)}"
    if rule.phases:
        yield f"in phase {', '.join(rule.phases)} alone"


def when(rule: PolicyRule) -> str:
    """When the rule fits, of what it covers."""
    phases = f"in phase {' or '.join(rule.phases)}, " if rule.phases else ""
    if rule.name == policy.OF_PROCESSORS:
        return "where the devices are processors"
    if rule.times == 1:
        return f"{phases}always"
    span = f" within {rule.window:g} s" if rule.window else ""
    return f"{phases}from no. {rule.times} on {SAME[rule.same]}{span}"


def waits(rule: PolicyRule) -> str:
    if not rule.backoff:
        return ""
    return (
        f"; from the second {SAME[rule.same]} on after about {rule.backoff:g} s, doubled up to"
        f" {rule.backoff_max:g} s"
    )


def budget(found: Policy | Explained) -> str:
    return (
        f"Budget: {found.max_restarts} restarts without a new checkpoint in between"
        f" (resilience.max_restarts), then stop, whatever a rule says (rule {policy.BUDGET}).\n"
        "Preemption, maintenance and what falls into them spend nothing of it; but after"
        f" {found.max_allocations} allocations in a row without a new checkpoint\n"
        "(resilience.max_allocations) the job is not queued again, whatever ended them."
    )


def listed_json(found: Policy) -> dict[str, Any]:
    body: dict[str, Any] = encode(found)
    return body


def listed_text(found: Policy) -> str:
    return "\n".join(_listed(found))


def _listed(found: Policy) -> Iterator[str]:
    yield "Rules; the first that fits decides:"
    for number, rule in enumerate(found.rules, 1):
        does = "as its class says" if rule.action == "class" else REMEDIES[rule.action]
        yield f"{number:>3} {rule.name}: {_covered(rule)}, {when(rule)}: {does}{waits(rule)}"
        if rule.why:
            yield f"    {rule.why}"
    yield budget(found)
    yield "Classes of failures (`ndctl policy explain CLASS`):"
    firsts = {rule.name: rule for rule in reversed(found.classes)}
    names = dict.fromkeys(rule.name for rule in found.classes)
    width = max(map(len, names))
    for name in names:
        yield f"    {name:<{width}}  {firsts[name].scope:<9}  {firsts[name].action}"


def _covered(rule: PolicyRule) -> str:
    parts = []
    if rule.classes:
        parts.append(", ".join(rule.classes))
    if rule.scopes:
        parts.append(f"scope {' or '.join(rule.scopes)}")
    if rule.says:
        parts.append(f"classes that say {' or '.join(rule.says)}")
    return " in ".join(parts) or "any failure"

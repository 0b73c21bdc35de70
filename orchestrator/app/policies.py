"""`ndctl policy`: the rules for failures, and the rules that one class of failure can meet."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from orchestrator.contract.codec import encode, nearest
from orchestrator.contract.spec.failures import FailureRule, Remedy
from orchestrator.contract.spec.job_spec import ResilienceSpec
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.diagnosis.classes import FailureSigns, classify
from orchestrator.diagnosis.classes import default_rules as default_classes
from orchestrator.errors import SpecError
from orchestrator.job.failures import policy
from orchestrator.load import read_spec

XID = re.compile(r"(?:xid)?[-_ ]?(\d+)", re.IGNORECASE)

REMEDIES: dict[Remedy, str] = {
    "restart": "restart on the same hosts",
    "replace": "restart without the host (use a spare; else shrink, if resilience.shrink allows it;"
    " else requeue)",
    "requeue": "release the hosts and requeue the job",
    "replan": "restart with a plan that needs less memory",
    "rollback": "restart from the previous checkpoint and skip the data read since",
    "stop": "stop and print the advice",
}
WARNING_CLASS = "host-warning"
REPLACES_WARNED = (
    "a spare takes the place of the host at the end of a step; without a spare the ranks save a"
    " checkpoint at once and go on"
)
LEAVES_WARNED = "nothing: the host stays, because it has not failed"
"""What follows from a warning, where the action is `replace`, and where it is another one."""
SAME = {
    "class": "failure of the same class",
    "host": "failure of the same class on the same host",
    "strike": "strike of any class against the same host",
    "error": "failure with the same error at the same step",
    "checkpoint": "failure of the same class without a new checkpoint in between",
    "start": "failure in a row without a step in between",
    "any": "failure that the rule covers",
}


class Policy(Struct, frozen=True, kw_only=True):
    """The rules of a spec followed by ndctl's own."""

    classes: tuple[FailureRule, ...]
    rules: tuple[PolicyRule, ...]
    max_restarts: int
    max_allocations: int


class Explained(Struct, frozen=True, kw_only=True):
    """What ndctl does about failures of one class."""

    name: str
    classes: tuple[FailureRule, ...]
    """Entries that classify a failure as this class."""
    rules: tuple[PolicyRule, ...]
    """Rules that can decide, in order. The last one always matches."""
    max_restarts: int
    max_allocations: int


def policy_of(
    spec: str | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Policy:
    resilience = read_spec(Path(spec), overrides, environ).resilience if spec else ResilienceSpec()
    # A spec does not say whether the job trains on CPUs, so the rule for CPUs is listed too.
    chosen = policy.options(resilience.on_oom, resilience.on_nan, on_processors=True)
    return Policy(
        classes=(*resilience.failure_classes, *default_classes()),
        rules=(*resilience.policy, *chosen, *policy.default_rules()),
        max_restarts=resilience.max_restarts,
        max_allocations=resilience.max_allocations,
    )


def explain(name: str, found: Policy) -> Explained:
    """The rules for a class.

    `name` is the name of a class, a prefix of one name, or the number of an Xid.

    Raises:
        SpecError: no class, or more than one class, matches `name`.
    """
    names = list(dict.fromkeys(rule.name for rule in found.classes))
    if name not in names:
        name = _resolve(name, names, found)
    classes = tuple(rule for rule in found.classes if rule.name == name)
    rules = [rule for rule, _ in _matching(found.rules, classes)]
    return Explained(
        name=name,
        classes=classes,
        rules=tuple(rules),
        max_restarts=found.max_restarts,
        max_allocations=found.max_allocations,
    )


def _matching(
    rules: Sequence[PolicyRule], entries: Sequence[FailureRule]
) -> Iterator[tuple[PolicyRule, list[FailureRule]]]:
    """Each rule that can decide, with the entries of the class that it can decide on.

    Entries of one class may differ in scope and action, so one rule may end the search for one
    entry and not for another.
    """
    undecided = list(entries)
    for rule in rules:
        if fitting := [one for one in undecided if _fits(rule, one)]:
            yield rule, fitting
        if _always(rule):
            undecided = [one for one in undecided if one not in fitting]


def _resolve(said: str, names: Sequence[str], found: Policy) -> str:
    prefixed = [name for name in names if name.startswith(f"{said}-")]
    if len(prefixed) == 1:
        return prefixed[0]
    if xid := XID.fullmatch(said):
        lines = (
            f"NVRM: Xid (PCI:0000:01:00): {xid[1]}, {rest}" for rest in ("pid=1", "NETIR Fatal")
        )
        known = classify(FailureSigns(lines=tuple(lines)), found.classes)
        if known is not None:
            return known.rule.name
    near = ", ".join(prefixed) or nearest(said, names)
    guess = f"did you mean {near}? " if near else ""
    raise SpecError(
        f"unknown failure class: {said}",
        fix=f"{guess}`ndctl policy` lists all classes; resilience.failure_classes of a spec adds"
        " more",
    )


def _fits(rule: PolicyRule, one: FailureRule) -> bool:
    said = not rule.says or one.action in rule.says
    return said and policy.concerns(rule, one.name, one.scope)


def _always(rule: PolicyRule) -> bool:
    return rule.times == 1 and not rule.phases and rule.name != policy.OOM_ON_CPU


def explained_json(found: Explained) -> dict[str, Any]:
    body: dict[str, Any] = encode(found)
    return body


def explained_text(found: Explained) -> str:
    return "\n".join(_explained(found))


def _done(name: str, action: Remedy) -> str:
    if name != WARNING_CLASS:
        return REMEDIES[action]
    return REPLACES_WARNED if action == "replace" else LEAVES_WARNED


def _explained(found: Explained) -> Iterator[str]:
    first = found.classes[0]
    ways = list(dict.fromkeys(map(_way, found.classes)))
    yield f"{found.name}: {'; or '.join(ways)}"
    yield f"  advice: {first.advice or 'none'}"
    for one in found.classes:
        which = f" ({_way(one)})" if len(ways) > 1 else ""
        yield f"  detected by: {'; '.join(_signs(one))}{which}"
    yield "Rules for this class, in order. The first rule that matches decides."
    width = max(len(rule.name) for rule in found.rules)
    for number, (rule, fitting) in enumerate(_matching(found.rules, found.classes), 1):
        met = list(dict.fromkeys(map(_way, fitting)))
        of = f", if {'; or '.join(met)}" if len(met) < len(ways) else ""
        said = dict.fromkeys(
            one.action if rule.action == "class" else rule.action for one in fitting
        )
        does = "; or ".join(_done(found.name, action) for action in said)
        yield f"  {number} {rule.name:<{width}}  {when(rule)}{of}: {does}{waits(rule)}"
        if rule.why:
            yield f"    {'':<{width}}  {rule.why}"
    yield budget(found)


def _way(one: FailureRule) -> str:
    return f"scope {one.scope}, action {one.action}"


def _signs(rule: FailureRule) -> Iterator[str]:
    if rule.kinds:
        yield f"incidents of kind {', '.join(rule.kinds)}"
    if rule.signals:
        yield f"signal {', '.join(rule.signals)}"
    if rule.exit_codes:
        yield f"exit code {', '.join(map(str, rule.exit_codes))}"
    if rule.patterns:
        yield f"log lines that match {'  '.join(rule.patterns)}"
    if rule.phases:
        yield f"only in phase {', '.join(rule.phases)}"


def when(rule: PolicyRule) -> str:
    """The condition of the rule beyond the classes and scopes that it covers."""
    phases = f"in phase {' or '.join(rule.phases)}, " if rule.phases else ""
    if rule.name == policy.OOM_ON_CPU:
        return "if the job trains on CPUs"
    if rule.times == 1:
        return f"{phases}always"
    span = f" within {_hours(rule.window)}" if rule.window else ""
    return f"{phases}from the {_ordinal(rule.times)} {SAME[rule.same]}{span}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"


def waits(rule: PolicyRule) -> str:
    if not rule.backoff:
        return ""
    return (
        f"; from the 2nd {SAME[rule.same]} wait about {rule.backoff:g} s first, doubled each time"
        f" up to {rule.backoff_max:g} s"
    )


def budget(found: Policy | Explained) -> str:
    return (
        f"Budget: after {found.max_restarts} restarts without a new checkpoint"
        f" (resilience.max_restarts) the job stops, whatever the rules say"
        f" (rule {policy.BUDGET}).\n"
        "Preemption, maintenance and failures during them do not count.\n"
        f"After {found.max_allocations} allocations in a row without a new checkpoint"
        " (resilience.max_allocations) the job is not requeued, whatever ended them."
    )


def listed_json(found: Policy) -> dict[str, Any]:
    body: dict[str, Any] = encode(found)
    return body


def listed_text(found: Policy) -> str:
    return "\n".join(_listed(found))


def _listed(found: Policy) -> Iterator[str]:
    yield "Rules, in order. The first rule that matches decides."
    for number, rule in enumerate(found.rules, 1):
        does = "the action of its class" if rule.action == "class" else REMEDIES[rule.action]
        yield f"{number:>3} {rule.name}: {_covered(rule)}, {when(rule)}: {does}{waits(rule)}"
        if rule.why:
            yield f"    {rule.why}"
    yield budget(found)
    yield "Failure classes, with scope and action (`ndctl policy explain CLASS` shows details):"
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
        parts.append(f"action of the class {' or '.join(rule.says)}")
    return ", ".join(parts) or "any failure"

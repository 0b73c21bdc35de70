"""Rules for failures, as data: the type of ndctl's rules and of those that a spec adds."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Struct

from ndctl.rank.phases import Phase
from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.failures import Remedy, Scope
from orchestrator.contract.spec.limits import AtLeast, Matches
from orchestrator.contract.spec.types import Count, Seconds

Same = Literal["class", "host", "strike", "error", "start", "checkpoint", "any"]
"""Which earlier incidents a rule counts, out of those that it covers:

- `class`: of the same class
- `host`: of the same class on the same host, drills excepted
- `strike`: of any class, if they are a strike against the same host
- `error`: with the same exception, message and step
- `start`: in a row without a new step in between
- `checkpoint`: of the same class without a new checkpoint in between
- `any`: all of them
"""

CLASS = r"[a-z*?][-a-z0-9*?]*"

RENAMED = {
    "refused": "invalid-configuration",
    "the-class-stops": "class-stop",
    "same-error-twice": "repeated-error",
    "twice-on-one-host": "repeat-on-host",
    "heals-by-itself": "transient-backoff",
    "asked-to-leave": "scheduler-signal",
    "as-the-class-says": "class-default",
    "on-oom-of-processors": "on-oom-cpu",
}
"""Former name of a rule of ndctl -> its name now. A spec that copied such a rule under its former
name is refused, so that a decision never names a rule that `ndctl policy` does not list."""


class PolicyRule(Struct, frozen=True, kw_only=True):
    """Matches a failure when every condition that it gives matches. An empty condition matches
    anything."""

    name: Annotated[
        str, Matches(r"[a-z][a-z0-9-]*", "a-z, 0-9 and -, first a letter", "bad-disk-moves")
    ]
    """Printed with each decision that the rule makes."""
    action: Remedy | Literal["class"]
    """`class`: the action of the failure's class."""
    classes: tuple[
        Annotated[str, Matches(CLASS, "the name of a class, with * and ? as wildcards", "xid-*")],
        ...,
    ] = ()
    """Names of failure classes, with * and ? as wildcards, such as `xid-*`. Empty: all."""
    scopes: tuple[Scope, ...] = ()
    """Scopes of failure classes. Empty: all."""
    phases: tuple[Phase, ...] = ()
    """Phases of the rank. A failure with an unknown phase matches no rule that has phases."""
    says: tuple[Remedy, ...] = ()
    """Actions of the failure's class."""
    same: Same = "class"
    """Which earlier incidents count. `class`: of the same class; `host`: also on the same host;
    `strike`: of any class against the same host; `error`: with the same exception, message and
    step; `start`: without a new step in between; `checkpoint`: of the same class without a new
    checkpoint in between; `any`: all."""
    times: Count = 1
    """The rule matches from this occurrence on; `same` says what counts as one."""
    window: Seconds | None = None
    """Seconds within which the occurrences must lie; null: since the job was last submitted."""
    backoff: Annotated[float, AtLeast(0)] = 0.0
    """Seconds to wait before the second restart by this rule; doubled for each later one. The
    first restart is immediate."""
    backoff_max: Seconds = 300.0
    """Longest wait in seconds."""
    why: str = ""
    """Reason, printed by `ndctl policy`."""

    def __post_init__(self) -> None:
        if self.backoff > self.backoff_max:
            raise Invalid(
                [
                    Problem(
                        path="backoff",
                        value=self.backoff,
                        limit=f"at most backoff_max {self.backoff_max:g}",
                        fix="raise backoff_max or lower backoff",
                    )
                ]
            )


def former_names(rules: Sequence[PolicyRule]) -> Iterator[Problem]:
    """A problem for each rule of a spec that has a former name of one of ndctl's rules.

    The check is not part of `PolicyRule`, because journals written before the renames hold rules
    with these names and must stay readable.
    """
    for number, rule in enumerate(rules):
        if now := RENAMED.get(rule.name):
            yield Problem(
                path=f"policy[{number}].name",
                value=rule.name,
                limit=f"another name, because ndctl's rule of this name is now called {now}",
                fix=f"write {now}, or a name of your own",
            )

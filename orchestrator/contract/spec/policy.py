"""What to do about a failure: ordered rules as data, ndctl's own and those that a user adds."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.spec.failures import Remedy, Scope
from orchestrator.contract.spec.limits import AtLeast, Matches
from orchestrator.contract.spec.types import Count, Seconds

Same = Literal["class", "host", "strike", "error", "start", "checkpoint", "any"]
"""Which of the incidents that a rule covers are counted together: those of one class; those of one
class on one host, but for drills; those that are strikes against one host, of whatever class; those
with the same exception, message and step; those in a row without one new step in between;
those of one class without a new checkpoint in between; or any."""

CLASS = r"[a-z*?][-a-z0-9*?]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRule:
    """Fits when all that it names fits: one of the classes, one of the scopes, and so on."""

    name: Annotated[
        str, Matches(r"[a-z][a-z0-9-]*", "a-z, 0-9 and -, first a letter", "bad-disk-moves")
    ]
    """Printed with each decision that the rule makes."""
    action: Remedy | Literal["class"]
    """`class`: what the failure's class says."""
    classes: tuple[
        Annotated[str, Matches(CLASS, "a class's name, * and ? for any signs", "xid-*")], ...
    ] = ()
    scopes: tuple[Scope, ...] = ()
    phases: tuple[Phase, ...] = ()
    """What the rank was doing; a failure of which that is not known fits no such rule."""
    says: tuple[Remedy, ...] = ()
    """The action of the failure's class."""
    same: Same = "class"
    times: Count = 1
    """Fits from the so-manyth such incident on."""
    window: Seconds | None = None
    """Seconds within which they have to lie; null: since a person last submitted the job."""
    backoff: Annotated[float, AtLeast(0)] = 0.0
    """Seconds to wait before the second such restart, doubled with each one after it; the first
    goes at once. For what may heal by itself."""
    backoff_max: Seconds = 300.0
    why: str = ""
    """Why that is right, for `ndctl policy`."""

    def __post_init__(self) -> None:
        if self.backoff > self.backoff_max:
            raise Invalid(
                [
                    Problem(
                        path="backoff",
                        value=self.backoff,
                        limit=f"at most backoff_max {self.backoff_max:g}",
                        fix="raise backoff_max, or wait less",
                    )
                ]
            )

    def concerns(self, name: str, scope: Scope) -> bool:
        """Whether failures of the class `name` may be its business."""
        named = not self.classes or any(fnmatchcase(name, each) for each in self.classes)
        return named and (not self.scopes or scope in self.scopes)

    def covers(self, name: str, scope: Scope, phase: Phase | None) -> bool:
        """Whether such a failure counts for it."""
        return self.concerns(name, scope) and (not self.phases or phase in self.phases)

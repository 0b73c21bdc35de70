"""What kinds of failure there are: rules as data, ndctl's own and those that a user adds."""

import re
import signal
from dataclasses import dataclass
from typing import Annotated, Literal

from orchestrator.contract.codec import Invalid, Problem, nearest
from orchestrator.contract.limits import Matches
from orchestrator.contract.phases import Phase

Scope = Literal["user", "rank", "host", "fabric", "storage", "scheduler"]
"""Where the cause lies, so who has to do something about it."""
Remedy = Literal["restart", "replace", "requeue", "replan", "rollback", "stop"]
"""`restart`: in place; `replace`: without the host (a spare, else fewer hosts if that is allowed,
else the queue); `requeue`: give the hosts back; `replan`: with a plan that takes less memory;
`rollback`: from one checkpoint back, without the data since; `stop`: a restart meets it again."""

KINDS = (
    "refused",
    "exception",
    "rank-killed",
    "rank-stopped",
    "rank-lost",
    "rank-exited",
    "hang",
    "host-lost",
    "hosts-lost",
    "leader-lost",
    "connection-lost",
    "launch-failed",
    "preflight",
)
"""What an incident can be by how it was seen, whatever its cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """Fits when all that it names fits: one of the patterns, one of the signals, and so on."""

    name: Annotated[
        str, Matches(r"[a-z][a-z0-9-]*", "a-z, 0-9 and -, first a letter", "cuda-out-of-memory")
    ]
    """The class. Several rules may lead to one."""
    scope: Scope
    action: Remedy
    advice: str = ""
    """What a person should do."""
    patterns: tuple[str, ...] = ()
    """Regular expressions, searched in each line without regard to case; one is enough."""
    signals: tuple[str, ...] = ()
    """Names, as SIGKILL, of what ended the process."""
    exit_codes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    """What ndctl calls the incident, as hang and host-lost, which no log line tells of."""
    phases: tuple[Phase, ...] = ()
    symptom: bool = False
    """A rank also says so when a peer of it went away: never the first cause of other ranks'."""
    source: str = ""
    """Where this is known from."""

    def __post_init__(self) -> None:
        problems = [
            Problem(path="patterns", value=pattern, limit="a regular expression", fix="mend it")
            for pattern in self.patterns
            if not _compiles(pattern)
        ]
        problems += [
            Problem(path="signals", value=name, limit="a signal's name", fix="write SIGKILL")
            for name in self.signals
            if name not in signal.Signals.__members__
        ]
        problems += [
            Problem(path="kinds", value=kind, limit=f"one of {', '.join(KINDS)}", fix=_near(kind))
            for kind in self.kinds
            if kind not in KINDS
        ]
        if not (self.patterns or self.signals or self.exit_codes or self.kinds):
            fix = "add patterns, signals, exit_codes or kinds"
            problems.append(Problem(path="patterns", limit="given, or a code", fix=fix))
        if problems:
            raise Invalid(problems)


def _near(kind: str) -> str:
    near = nearest(kind, KINDS)
    return f"did you mean {near}?" if near else "take one of these"


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True

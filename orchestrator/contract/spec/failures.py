"""What kinds of failure there are: rules as data, ndctl's own and those that a user adds."""

import signal
from dataclasses import dataclass
from typing import Annotated, Literal

from orchestrator.contract.codec import Invalid, Problem, nearest
from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.spec.limits import Matches

Scope = Literal["user", "rank", "host", "fabric", "storage", "scheduler"]
"""Where the cause lies, so who has to do something about it."""
Remedy = Literal["restart", "replace", "requeue", "replan", "rollback", "stop"]
"""`restart`: in place; `replace`: without the host (a spare, else fewer hosts if that is allowed,
else the queue); `requeue`: give the hosts back; `replan`: with a plan that takes less memory;
`rollback`: from one checkpoint back, without the data since; `stop`: a restart meets it again."""

KINDS = (
    "refused",
    "ended-early",
    "exception",
    "rank-killed",
    "rank-stopped",
    "rank-lost",
    "rank-exited",
    "hang",
    "host-lost",
    "hosts-lost",
    "leader-lost",
    "cut-off",
    "allocation-broke",
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
    """Regular expressions in RE2's syntax, searched in each line without regard to case; one is
    enough."""
    unless: tuple[str, ...] = ()
    """Regular expressions too: a line in which one of them is found does not count."""
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
        if self.unless and not self.patterns:
            fix = "add patterns; unless only leaves out lines that these find"
            problems.append(Problem(path="unless", limit="given with patterns", fix=fix))
        if problems:
            raise Invalid(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The class of what a process, a launcher or a kernel said. It is decided once, where that was
    said, and kept: a class that is decided again with another table may be another one."""

    name: str
    scope: Scope
    action: Remedy
    advice: str = ""
    symptom: bool = False
    """A rank also says so when a peer of it went away."""
    own: bool = False
    """It is a class of the user's, who knows more than ndctl's own rules."""
    line: str = ""
    """The line that decided; empty where it was a signal, an exit code or a kind."""
    pattern: str = ""
    """The one that was found in the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReading:
    """What the end of one rank means, as far as the rank itself tells."""

    failure: Reading | None = None
    """None: nothing of it is known."""
    symptom: bool = False
    """It is what losing a peer looks like."""
    timed_out: bool = False
    """A collective did not return in time: a hang, seen by the rank itself."""


def _near(kind: str) -> str:
    near = nearest(kind, KINDS)
    return f"did you mean {near}?" if near else "take one of these"

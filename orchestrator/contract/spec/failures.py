"""Failure classes as data: the type of ndctl's rules and of those that a spec adds."""

import signal
from typing import Annotated, Literal

from msgspec import Struct

from ndctl.rank.phases import Phase
from orchestrator.contract.codec import Invalid, Problem, nearest
from orchestrator.contract.spec.limits import Matches

Scope = Literal["user", "rank", "host", "fabric", "storage", "scheduler"]
"""Where the cause lies, and so who has to act."""
Remedy = Literal["restart", "replace", "requeue", "replan", "rollback", "stop"]
"""`restart`: on the same hosts; `replace`: without the host (with a spare, else with fewer hosts if
`shrink` allows it, else through the queue); `requeue`: give the hosts back and wait in the queue;
`replan`: with a plan that needs less memory; `rollback`: from one checkpoint back, without the data
read since; `stop`: end the job, because a restart would fail in the same way."""

KINDS = (
    "refused",
    "disk-full",
    "ended-early",
    "ended-first",
    "exception",
    "rank-killed",
    "rank-stopped",
    "rank-lost",
    "rank-exited",
    "hang",
    "host-lost",
    "agent-lost",
    "hosts-lost",
    "leader-lost",
    "cut-off",
    "allocation-broke",
    "connection-lost",
    "launch-failed",
    "preflight",
    "host-warned",
)
"""Kinds of incident: how the failure was detected, independent of its cause."""


class FailureRule(Struct, frozen=True, kw_only=True):
    """Matches if every condition that it gives matches. Of several patterns (or signals, exit
    codes, kinds, phases) one is enough."""

    name: Annotated[
        str, Matches(r"[a-z][a-z0-9-]*", "a-z, 0-9 and -, first a letter", "cuda-out-of-memory")
    ]
    """The failure class. Several rules may share one."""
    scope: Scope
    """Where the cause lies, and so who has to act."""
    action: Remedy
    """What ndctl does: `restart` on the same hosts; `replace`: without the host; `requeue`: give
    the hosts back and wait in the queue; `replan`: with a plan that needs less memory; `rollback`:
    from one checkpoint back, without the data read since; `stop`: end the job."""
    advice: str = ""
    """What the user should do."""
    patterns: tuple[str, ...] = ()
    """Regular expressions in RE2 syntax, searched in each line, case-insensitive."""
    unless: tuple[str, ...] = ()
    """Regular expressions. A line that contains one of them does not match."""
    signals: tuple[str, ...] = ()
    """Names of signals that ended the process, such as SIGKILL."""
    exit_codes: tuple[int, ...] = ()
    """Exit codes of the process."""
    kinds: tuple[str, ...] = ()
    """Kinds of incident, such as hang and host-lost, which leave no log line."""
    phases: tuple[Phase, ...] = ()
    """Phases of the rank in which the rule applies. Empty: all."""
    symptom: bool = False
    """The message also appears when a peer failed, so it is never the root cause if another rank
    failed with a message that is not a symptom."""
    source: str = ""
    """Where this knowledge comes from."""

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
            fix = "add patterns; unless only excludes lines that match patterns"
            problems.append(Problem(path="unless", limit="given with patterns", fix=fix))
        if problems:
            raise Invalid(problems)


class Reading(Struct, frozen=True, kw_only=True):
    """The failure class of a message from a process, a launcher or a kernel. It is decided once,
    where the message was seen, and stored, because another version may have other rules."""

    name: str
    scope: Scope
    action: Remedy
    advice: str = ""
    symptom: bool = False
    """The message also appears when a peer failed."""
    own: bool = False
    """The class comes from the spec, so it goes before ndctl's own rules."""
    line: str = ""
    """The line that matched; empty if a signal, an exit code or a kind matched."""
    pattern: str = ""
    """The pattern that matched the line."""


class ExitReading(Struct, frozen=True, kw_only=True):
    """What the end of one rank means, as far as this rank alone shows."""

    failure: Reading | None = None
    """null: unknown."""
    symptom: bool = False
    """The end looks like a reaction to the loss of a peer."""
    timed_out: bool = False
    """A collective timed out: the rank itself detected a hang."""


def _near(kind: str) -> str:
    near = nearest(kind, KINDS)
    return f"did you mean {near}?" if near else "take one of these"

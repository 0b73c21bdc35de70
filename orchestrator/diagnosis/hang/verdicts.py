"""Evidence about a hang, and the verdict on it. Plain values."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

from orchestrator.contract.spec.failures import Scope
from orchestrator.diagnosis.dumps.dump import RankDump

Kind = Literal[
    "never-entered",
    "mismatch",
    "skipped",
    "left-inside",
    "network",
    "stopped",
    "alone",
    "together",
    "thread",
    "healthy",
    "not-known",
]
"""healthy: no hang. never-entered: the culprit did not call an operation in which others wait.
mismatch: it called another operation. skipped: it went past an operation that its peers called.
left-inside: the operation completed on all other ranks. network: all ranks called the operation and
it completed on none. stopped: its process does not run. alone: its stack differs from all others.
together: all ranks are at the same place, and none waits for another. thread: the program has
ended, and a thread of it has not."""


class RankFacts(Struct, frozen=True, kw_only=True):
    """What is known about a rank besides its dump."""

    rank: int
    host: str | None = None
    process_state: str | None = None
    """Linux state letter (`R`, `S`, `D`, ...) or `gone`; None: not read."""
    asked: bool = False
    """Was asked for its stacks, and slow storage is not the reason if it gave none."""
    stack: tuple[str, ...] = ()
    ended: str = ""
    """How it had ended before the evidence was collected, such as `exit code 0`; empty: it had not.
    """
    withheld: bool = False
    """Was running and was asked for its dump, but wrote none in time."""
    step: int | None = None
    phase: str | None = None
    age_s: float | None = None
    place: str = ""
    """Kernel function in which a process in state D waits: `FUNCTION of MODULE`."""
    still_s: float = 0.0
    """Seconds since its last progress."""
    starved_s: float = 0.0
    """Seconds of `still_s` in which it was ready to run but had no CPU."""
    throttled: bool = False
    """Its control group was throttled (cpu.max) in that time."""


class HangEvidence(Struct, frozen=True, kw_only=True):
    """All evidence of one incident."""

    dumps: Mapping[int, RankDump] = field(default_factory=dict)
    facts: Mapping[int, RankFacts] = field(default_factory=dict)
    world: int | None = None
    """Number of ranks; None: unknown, then the ranks in the evidence count."""
    axes: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Mesh axis -> members of each of its groups, because dumps may not name members."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """File -> why it could not be read."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """File that looks like evidence -> why it was skipped."""

    def host(self, rank: int) -> str | None:
        facts = self.facts.get(rank)
        return None if facts is None else facts.host


class Waiting(Struct, frozen=True, kw_only=True):
    """An operation that ranks wait in."""

    group: str
    desc: str
    seq: int
    op: str
    size: int
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks whose dump shows that they did not call it."""
    unknown: tuple[int, ...]
    """Ranks without a dump."""
    open: bool = False
    """No dump names the members of its group, so `size` counts only those that are known."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    kind: Kind
    scope: Scope | None
    """None: unknown."""
    ranks: tuple[int, ...]
    """Culprits, the most likely first; empty: no culprit."""
    hosts: tuple[str, ...]
    """Hosts to exclude; empty if the program is wrong or the evidence is not sufficient."""
    confidence: float
    """0 to 1."""
    cause: str
    evidence: tuple[str, ...] = ()
    """One finding per item."""
    waiting: tuple[Waiting, ...] = ()
    """Operations in which ranks wait, those that led to the verdict first."""
    num_waiting: int = 0
    no_dump: tuple[int, ...] = ()
    advice: str = ""

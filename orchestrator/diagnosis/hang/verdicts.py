"""What is known of a job whose ranks stand still, and what is made of it. Plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
    "healthy",
    "not-known",
]
"""healthy: the job runs, or ended in order. never-entered: others wait for it in an operation that
it did not call. mismatch: it called something else. skipped: it is past something that its peers
did first. left-inside: it alone did not come out of an operation. network: all went in, none came
out. stopped: its process does not run. alone: so say stacks, without dumps. together: all ranks are
in the same place, and none waits for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What was found out about a rank besides its dump."""

    rank: int
    host: str | None = None
    process_state: str | None = None
    """Linux's letter or `gone`; None: nobody looked."""
    asked: bool = False
    """Was asked for its stacks, and could have given them: storage did not hold them back."""
    stack: tuple[str, ...] = ()
    withheld: bool = False
    """Ran, was asked for its dump, and gave none in time."""
    step: int | None = None
    phase: str | None = None
    age_s: float | None = None
    place: str = ""
    """Where in the kernel a process in state D waits: `FUNCTION of MODULE`."""
    still_s: float = 0.0
    """Seconds since it last got on …"""
    starved_s: float = 0.0
    """… of which it was ready to run and had no processor."""
    throttled: bool = False
    """Its control group used up its share of the processors meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All evidence of one incident."""

    dumps: Mapping[int, RankDump] = field(default_factory=dict)
    facts: Mapping[int, RankFacts] = field(default_factory=dict)
    world: int | None = None
    """How many ranks the job has; None: not known, so those that are named."""
    axes: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Name of a kind of group -> members of each, where dumps do not name them."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """File -> why it could not be read."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """File -> why it was not taken, though it looks like evidence."""

    def host(self, rank: int) -> str | None:
        facts = self.facts.get(rank)
        return None if facts is None else facts.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An operation that ranks wait in."""

    group: str
    desc: str
    seq: int
    op: str
    size: int
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks of whom there is a dump, and which did not call it."""
    unknown: tuple[int, ...]
    """Ranks of whom there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    kind: Kind
    scope: Scope | None
    """None: not known."""
    ranks: tuple[int, ...]
    """To blame, the likeliest first; empty blames nobody."""
    hosts: tuple[str, ...]
    """To leave out; empty where the program is to blame, or the evidence is thin."""
    confidence: float
    """0 to 1."""
    cause: str
    evidence: tuple[str, ...] = ()
    """How it is known, one sign each."""
    waiting: tuple[Waiting, ...] = ()
    """Where the others wait, those first that led to the verdict."""
    num_waiting: int = 0
    no_dump: tuple[int, ...] = ()
    advice: str = ""

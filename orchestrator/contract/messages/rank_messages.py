"""What a rank tells its agent: one JSON datagram each on the agent's Unix socket.

Sending never fails training. A beat that cannot be sent at once is lost; what is told only once
(resumed, saved or not saved, raised, a drill) may wait up to a second for room in the agent's
socket.
"""

from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.files.checkpoint_names import PassedOver
from orchestrator.contract.messages import wire
from orchestrator.contract.messages.rank_phase import Phase

MAX_BYTES = 60_000
"""A larger text is cut before it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """The rank's process exists."""

    attempt: int
    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A step was done, or another phase began."""

    attempt: int
    rank: int
    step: int
    """Optimizer steps of the job that are done; the checkpoint's step right after a resume."""
    phase: Phase
    loss: float | None = None
    tokens_per_second: float | None = None
    """Of the whole job."""
    memory_bytes: int | None = None
    """Peak device memory; on CPU, the resident set."""
    own_s: float | None = None
    """What this rank itself took in the step before it entered its first collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Rank 0 loaded its state, or found none and began at step 0."""

    attempt: int
    rank: int
    step: int
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Rank 0 committed a checkpoint: it is complete from now on."""

    attempt: int
    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint could not be written; training goes on, and the ones before it are whole."""

    attempt: int
    rank: int
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChanged:
    """From `step` on all ranks save after another number of steps (`checkpoint.every: auto`)."""

    attempt: int
    rank: int
    step: int
    old: int
    new: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The rank is about to die of a Python exception."""

    attempt: int
    rank: int
    step: int
    """The step that was being computed."""
    error: str
    """Class of the exception."""
    message: str
    traceback: str
    since: int | None = None
    """The first step that was bad, where several were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFired:
    """The rank is about to suffer drill `drill`; for a host drill its agent is to die."""

    attempt: int
    rank: int
    drill: int
    step: int


Above = Literal["keeper", "torchrun", "launcher"]
"""What a rank dies with, by the kernel's hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """The rank's process is gone; told by the process that waited for it."""

    attempt: int
    rank: int
    exit_code: int | None
    """What it returned; None when a signal killed it."""
    signal: int | None
    step: int = 0
    """Steps that it had done, whatever became of its beats."""
    above: Above | None = None
    """The process above it that `signal` ended, where that is how it ended."""


Datagram = (
    RankStarted
    | Beat
    | Resumed
    | Saved
    | SaveFailed
    | IntervalChanged
    | Raised
    | DrillFired
    | RankEnded
)


def to_bytes(datagram: Datagram) -> bytes:
    return wire.encode(datagram)


def from_bytes(data: bytes) -> Datagram:
    """Raises ValueError when the bytes are not a datagram of this version."""
    datagram: Datagram = wire.decode(Datagram, data)
    return datagram

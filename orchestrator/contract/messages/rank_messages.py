"""Messages from a rank to its agent: one JSON datagram each on the agent's Unix socket.

Events of the job (`events.py`) are sent as they are. The messages defined here stay on the host.
Sending never fails training. A heartbeat that cannot be sent at once is lost. Messages that are
sent only once may wait up to a second for room in the agent's socket.
"""

from msgspec import Struct

from ndctl.rank.phases import Phase
from orchestrator.contract.messages import wire
from orchestrator.contract.messages.events import RankError, RankEvent
from orchestrator.contract.spec.types import ProcessId, Step

MAX_BYTES = 60_000
"""Longer text is cut before it is sent."""


class RankStarted(Struct, frozen=True, kw_only=True):
    """The rank's process exists."""

    attempt: int
    rank: int
    local_rank: int
    pid: ProcessId


class Beat(Struct, frozen=True, kw_only=True):
    """A heartbeat: a step was done, or another phase began."""

    attempt: int
    rank: int
    step: Step
    """Optimizer steps of the job that are done; after a resume, the step of the checkpoint."""
    phase: Phase
    loss: float | None = None
    tokens_per_second: float | None = None
    """Of the whole job."""
    own_s: float | None = None
    """Seconds of the step before the rank entered its first collective."""
    active: bool = False
    """A user's program, whose steps and phases are not all known, has called a collective since its
    last beat, so it does not stand still."""


class RankRaised(Struct, frozen=True, kw_only=True):
    """The rank is about to die of a Python exception. Its watcher copies the error into
    `RankExited`.
    """

    attempt: int
    rank: int
    error: RankError


class RankLeft(Struct, frozen=True, kw_only=True):
    """The rank takes no part in the attempt any more. Its process waits for an order to join the
    next one."""

    attempt: int
    rank: int
    step: Step


class Profiled(Struct, frozen=True, kw_only=True):
    """The answer of a rank to `ndctl profile`. Its agent forwards it to the leader."""

    attempt: int
    rank: int
    request: str
    """Id of the request."""
    first_step: Step = 0
    """The first step that was recorded."""
    files: tuple[str, ...] = ()
    """Paths, the trace first; on a GPU also a snapshot of its memory."""
    why: str = ""
    """Why there are no files."""


class CopyReady(Struct, frozen=True, kw_only=True):
    """A slot in memory is complete, and partner hosts must get a copy of it. Repeated until the
    agent marks the slot."""

    attempt: int
    rank: int
    step: Step
    slot: int
    """Which of the rank's slots."""
    copies: int
    """On how many partner hosts."""


class CopiesEnded(Struct, frozen=True, kw_only=True):
    """The ranks keep no checkpoints in memory in the rest of this attempt, so the agent need not
    keep copies of other hosts'."""

    attempt: int
    rank: int


Datagram = (
    RankStarted | Beat | RankRaised | RankLeft | Profiled | CopyReady | CopiesEnded | RankEvent
)
DATAGRAMS = wire.Decoder(Datagram)


def to_bytes(datagram: Datagram) -> bytes:
    return wire.encode(datagram)


def from_bytes(data: bytes) -> Datagram:
    """Raises ValueError when the bytes are not a datagram of this version."""
    datagram: Datagram = DATAGRAMS.decode(data)
    return datagram


def sender_of(datagram: Datagram) -> int:
    """The rank that sent it. Rank 0 sends the events that have no rank and concern all ranks."""
    rank: int = getattr(datagram, "rank", 0)
    return rank

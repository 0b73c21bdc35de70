"""What leader, agents and ranks tell each other about checkpoints in the memory of hosts."""

from msgspec import Struct

from orchestrator.contract.files.checkpoint_names import Made, SkippedCheckpoint
from orchestrator.contract.memory.slot_file import Label


class HostMemory(Struct, frozen=True, kw_only=True):
    lineage: int
    """The attempt in which training last started from the disk or at step 0; 0 if none has trained.
    Only checkpoints with this lineage are used: those of an earlier one are of steps that were
    trained again since."""
    slots: tuple[tuple[str, ...], ...]
    """Local rank -> paths of its slots, three or with partners four: files in memory, empty at
    first, which exist as long as the agent."""
    resumed: tuple[Made, ...] = ()
    """As in `is_history`."""
    restored: Made | None = None
    """The checkpoint that hosts without it have fetched from partners."""
    copies: int = 0
    """Partner hosts to which the agent sends copies."""
    others: tuple[str, ...] = ()
    """Paths of the other complete slots on this host: copies of those of other hosts, and slots of
    ranks that this attempt does not have. Ranks of another mesh read parts of them."""
    damaged: tuple[SkippedCheckpoint, ...] = ()
    """Copies on partners that were not fetched because they had changed."""
    held_bytes: int = 0
    """What the agent has reserved for copies of other hosts' slots."""
    why: str = ""
    """Why there are no slots."""


class Peer(Struct, frozen=True, kw_only=True):
    """An agent that keeps copies of slots of other hosts."""

    host: str
    address: str
    port: int


class Wanted(Struct, frozen=True, kw_only=True):
    """A slot of a rank, and the agents that have it."""

    rank: int
    label: Label
    peers: tuple[Peer, ...]


class CopyPlan(Struct, frozen=True, kw_only=True):
    """What one host does with checkpoints in memory during an attempt."""

    resumed: tuple[Made, ...] = ()
    """As in `is_history`."""
    restored: Made | None = None
    """The checkpoint that all hosts fetch which do not have it; None: each rank has one itself, or
    no complete one exists."""
    wanted: tuple[Wanted, ...] = ()
    """The slots of `restored` for the ranks of this host. If that is of another number of ranks:
    those which no host of the attempt has."""
    partners: tuple[Peer, ...] = ()
    """Where this host sends copies of its slots."""
    holds: tuple[int, ...] = ()
    """Ranks of other hosts whose copies this host keeps."""
    bytes_per_s: int | None = None
    """Limit of what this host sends; None: no limit."""


class OfferSlots(Struct, frozen=True, kw_only=True):
    """Report which slots this host has, and where it serves them."""

    attempt: int


class SlotsOffered(Struct, frozen=True, kw_only=True):
    attempt: int
    host: str
    port: int
    """0: it serves none."""
    slots: tuple[Label, ...] = ()
    """Complete ones: of its own ranks, and copies of others."""

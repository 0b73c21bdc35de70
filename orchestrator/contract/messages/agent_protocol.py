"""What agents and leader say to each other: one JSON text message each on a WebSocket.

The agent connects to `/v1/agent` of the leader, over TLS with the job's own certificate. The answer
to its first request is 401 with a random number; the second one, on the same connection, has a
`Proof` and becomes the WebSocket. The agent says `Register` first, then reports; the leader answers
with orders and a `Pulse` each second, so that either side knows silence from rest. A POST to
`/v1/cancel` cancels the job, in the same two steps. The job's secret never travels
(`job_secret.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.contract.checkpoint_interval import SavePace
from orchestrator.contract.messages.events import AgentEvent, AgentRegistered, EvidenceGathered
from orchestrator.contract.messages.rank_phase import Phase
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.drills import Drill
from orchestrator.contract.spec.failures import FailureRule

AGENT_PATH = "/v1/agent"
CANCEL_PATH = "/v1/cancel"
CHALLENGE = "WWW-Authenticate"
"""The header of the leader's first answer: `SCHEME` and a random number."""
SCHEME = "ndctl"
REPORT_BYTES = 32 << 20
"""The longest message that a leader takes: the evidence of a host of many ranks, with reduced dumps
of their flight recorders, has a few MiB."""
ORDER_BYTES = 32 << 20
"""The longest message that an agent takes: a check of the fabric names all hosts."""
PULSE_S = 1.0
"""Seconds between two pulses, and between two digests."""


Purpose = Literal["agent", "cancel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who asks the leader for what."""

    purpose: Purpose
    launch: int
    host: str = ""
    """Of an agent."""
    incarnation: str = ""
    """Of an agent, as in its `Register`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Goes in the header `Authorization`, as JSON after `SCHEME`."""

    claim: Claim
    mac: str
    """HMAC-SHA256 over the random number of this connection and the claim, with the host's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """The first message of an agent on each connection."""

    agent: AgentRegistered
    """The event, if the agent is new to the leader, which adds what it finds itself."""
    launch: int
    sent_at: float
    """Unix seconds of the agent's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A message there and back between two hosts that are neighbours on the ring of all."""

    peer: str
    seconds: float
    """The median of a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How the small all-reduce over several hosts went, as one of them saw it."""

    check: int
    host: str
    state: Literal["ok", "waited", "broke"]
    """`waited`: it did its part and the others did not; `broke`: its own process could not."""
    seconds: float | None
    """Of the fastest all-reduce; None when there was none in time."""
    bytes_per_second: float | None = None
    """Of the largest all-reduce."""
    links: tuple[Link, ...] = ()
    waited_for: tuple[str, ...] = ()
    """Hosts that gave no sign of life when time was over."""
    why: str = ""
    """What went wrong, with the peer that it waited for where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of a rank's training steps since the digest before; what has a phase of its own between two
    steps is not in them."""

    count: int
    total_s: float
    longest_s: float
    next_s: tuple[float, ...] = ()
    """The next longest, from the longest of them down: by how steps vary it is known which one is
    too long, and short steps are many to a digest."""
    own_s: float | None = None
    """Of `total_s`, the rank's own work before each step's first collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDigest:
    """The last word of one rank."""

    rank: int
    pid: int
    step: int
    phase: Phase
    age_s: float
    """Since its last datagram."""
    still_s: float
    """Since its step or phase last changed, less what it or its agent waited for a processor."""
    loss: float | None
    tokens_per_second: float | None
    memory_bytes: int | None
    ended: bool = False
    steps: StepTimes | None = None
    """None where it did none since the digest before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Sent each second, and at once when a rank's first step of an attempt is done, or when the
    host's ranks have stood still for as long as the leader's pulse says."""

    attempt: int
    ranks: tuple[RankDigest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """`EvidenceGathered`, with the dumps that are too large for the journal."""

    event: EvidenceGathered
    dumps: Mapping[str, str] = field(default_factory=dict)
    """Rank -> its flight recorder's dump, reduced (`diagnosis/dumps/dump_summary.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A free port of the host that is to be node 0 of `attempt`."""

    attempt: int
    port: int


Report = Register | Digest | Evidence | Port | Checked | AgentEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The leader lives."""

    launch: int
    still_s: float | None = None
    """Ranks that stand still for so long are to be told of at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPort:
    """Find a free port to be torchrun's master of `attempt`, and say it."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFabric:
    """Take part in a small all-reduce, one process a host."""

    check: int
    """Counts the checks of a launch."""
    rank: int
    hosts: tuple[str, ...]
    """In rank order; the first is the leader's own, which chose the port."""
    master_address: str
    master_port: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    attempt: int
    node_rank: int
    nodes: int
    ranks_per_host: int
    master_address: str
    master_port: int
    config: str
    """The trainer's CONFIG."""
    drills: tuple[Drill, ...]
    resume: bool = True
    """From the newest checkpoint; or whatever lies there is of another run."""
    steps: int = 0
    """Of the job: a rank that returns 0 before the last one has not done its work."""
    skip: tuple[Window, ...] = ()
    """Data that is left out on purpose."""
    pace: SavePace = field(default_factory=SavePace)
    classes: tuple[FailureRule, ...] = ()
    """The user's: lines of a host's kernel are sorted by them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    attempt: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    attempt: int
    timeout_s: float
    ended: bool = False
    """What ranks wrote as they ended: the attempt is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The job is over, or given back: go."""

    reason: str
    again: bool = False
    """Another agent is to come in this one's place: one that leaves with 0 nobody makes anew, and
    a pod of the job's next run may have found the leader of this one yet."""


Order = Pulse | OfferPort | CheckFabric | Start | Stop | Gather | Leave

"""Messages between agents and leader: one JSON text message each on a WebSocket.

The agent connects to `/v1/agent` of the leader, over TLS with the job's own certificate. The answer
to its first request is 401 with a random number. The second request, on the same connection, has a
`Proof` and becomes the WebSocket. The agent sends `Register` first, then reports. The leader sends
orders and, each second, a `Pulse`, so that the agent can tell a silent leader from an idle one. A
POST to `/v1/cancel` cancels the job, one to `/v1/stacks` asks where its ranks are, and one to
`/v1/profile` has some of them profiled, in the same two steps. The job's secret is never sent
(`job_secret.py`).
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Struct, field

from ndctl.rank.phases import Phase
from orchestrator.contract.checkpoint_interval import SavePace
from orchestrator.contract.drills import Drill
from orchestrator.contract.memory.peers import CopyPlan, OfferSlots, SlotsOffered
from orchestrator.contract.messages.events import (
    AgentEvent,
    AgentRegistered,
    EvidenceGathered,
    RankEvidence,
)
from orchestrator.contract.messages.rank_messages import Profiled
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.contract.spec.limits import Above, AtLeast, AtMost
from orchestrator.contract.spec.run_spec import Capture, Keep, RunSpec

AGENT_PATH = "/v1/agent"
CANCEL_PATH = "/v1/cancel"
STACKS_PATH = "/v1/stacks"
PROFILE_PATH = "/v1/profile"
CHALLENGE = "WWW-Authenticate"
"""Header of the leader's first answer: `SCHEME` and a random number."""
SCHEME = "ndctl"
REPORT_BYTES = 32 << 20
"""Largest message that a leader accepts. The evidence of a host with many ranks, with reduced dumps
of their flight recorders, has a few MiB."""
ORDER_BYTES = 32 << 20
"""Largest message that an agent accepts. A fabric check lists all hosts."""
MOST_PROFILED = 100
"""Steps of a profile. A trace has some 10 MB a step, and the step waits while it is recorded."""
PULSE_S = 1.0
"""Seconds between two pulses, and between two digests."""


Purpose = Literal["agent", "cancel", "stacks", "profile", "memory"]
"""`memory`: an agent, at another agent."""


class Claim(Struct, frozen=True, kw_only=True):
    """What a client says about itself and its purpose."""

    purpose: Purpose
    launch: int
    host: str = ""
    """Host of an agent; empty for other clients."""
    incarnation: str = ""
    """Incarnation of an agent, as in its `Register`."""


class Proof(Struct, frozen=True, kw_only=True):
    """Sent in the header `Authorization`, as JSON after `SCHEME`."""

    claim: Claim
    mac: str
    """HMAC-SHA256 over the random number of this connection and the claim, with the host's key."""


class Register(Struct, frozen=True, kw_only=True):
    """The first message of an agent on each connection."""

    agent: AgentRegistered
    """The event to journal if the agent is new. The leader adds what it finds itself."""
    launch: int
    sent_at: float
    """Unix seconds of the agent's clock."""


class Link(Struct, frozen=True, kw_only=True):
    """Round-trip time between two hosts that are neighbours on the ring of all hosts."""

    peer: str
    seconds: float
    """Median of a few round trips."""


class Checked(Struct, frozen=True, kw_only=True):
    """Result of the small all-reduce over several hosts, as one of them saw it."""

    check: int
    host: str
    state: Literal["ok", "waited", "broke"]
    """`waited`: this host was ready but others were not; `broke`: its own process failed."""
    links: tuple[Link, ...] = ()
    waited_for: tuple[str, ...] = ()
    """Hosts that had not responded when time was up."""
    why: str = ""
    """What went wrong, with the peer that it waited for if that is known."""


class StepTimes(Struct, frozen=True, kw_only=True):
    """A rank's training steps since the previous digest. Time in other phases between two steps is
    not included."""

    count: int
    total_s: float
    longest_s: float
    next_s: tuple[float, ...] = ()
    """The next longest steps, longest first. Their spread shows which step is unusually long."""
    own_s: float | None = None
    """Part of `total_s`: the rank's own work before the first collective of each step."""


class RankDigest(Struct, frozen=True, kw_only=True):
    """The latest state of one rank."""

    rank: int
    pid: int
    step: int
    phase: Phase
    age_s: float
    """Seconds since its last datagram."""
    still_s: float
    """Seconds since its step or phase last changed, without the time in which the rank or its agent
    waited for a CPU."""
    loss: float | None
    tokens_per_second: float | None
    ended: bool = False
    steps: StepTimes | None = None
    """None: no step was done since the previous digest."""


class MemoryUse(Struct, frozen=True, kw_only=True):
    """Checkpoints in the memory of one host."""

    host: str
    num_bytes: int
    """Of the slots of its ranks, and of the copies that it holds for other hosts."""
    held: int
    """Complete copies of slots of other hosts."""
    copied_s: float | None
    """Seconds since partners got the last slot of one of its ranks; None: they have none."""
    damaged: int = 0
    """Copies that it fetched from partners and that had changed, since its agent began."""


class Digest(Struct, frozen=True, kw_only=True):
    """Sent each second. Also sent at once when a rank finishes its first step of an attempt, and
    when the host's ranks have stood still for the leader's `still_s`."""

    attempt: int
    ranks: tuple[RankDigest, ...]
    memory: MemoryUse | None = None
    """None: no checkpoints in memory."""


class Evidence(Struct, frozen=True, kw_only=True):
    """`EvidenceGathered`, with the dumps that are too large for the journal."""

    event: EvidenceGathered
    dumps: Mapping[str, str] = field(default_factory=dict)
    """Rank -> reduced dump of its flight recorder (`diagnosis/dumps/dump_summary.py`)."""
    for_a_person: bool = False
    """The answer to such a `Gather`."""


class RankStacks(Struct, frozen=True, kw_only=True):
    """Where the ranks of a running job are: the answer to `ndctl snapshot`."""

    attempt: int
    traces: str
    """The folder that has the whole stacks, `rank-<r>.stacks`."""
    ranks: Mapping[str, RankEvidence]
    """Rank -> its process, step, phase and stack."""
    missing: Mapping[str, str]
    """What could not be collected -> why."""


class ProfileWish(Struct, frozen=True, kw_only=True):
    """What a person asks the leader for, with `ndctl profile`."""

    ranks: tuple[Annotated[int, AtLeast(0)], ...]
    steps: Annotated[int, AtLeast(1), AtMost(MOST_PROFILED)]
    wait_s: Annotated[float, Above(0)]
    """How long the leader waits for the ranks."""


class RankProfiles(Struct, frozen=True, kw_only=True):
    """The answer to a `ProfileWish`."""

    attempt: int
    ranks: Mapping[str, Profiled]
    """Rank -> its files."""
    missing: Mapping[str, str]
    """Rank -> why it has none, or none yet."""


class Port(Struct, frozen=True, kw_only=True):
    """A free port on the host that will be node 0 of `attempt`."""

    attempt: int
    port: int


Report = Register | Digest | Evidence | Port | SlotsOffered | Checked | Profiled | AgentEvent


class Pulse(Struct, frozen=True, kw_only=True):
    """Shows that the leader is alive."""

    launch: int
    still_s: float | None = None
    """The agent must report ranks at once that stand still for this many seconds."""


class OfferPort(Struct, frozen=True, kw_only=True):
    """Find a free port for torchrun's rendezvous of `attempt`, and report it."""

    attempt: int


class CheckFabric(Struct, frozen=True, kw_only=True):
    """Take part in a small all-reduce, one process per host."""

    check: int
    """Number of the check in this launch."""
    rank: int
    hosts: tuple[str, ...]
    """In rank order. The first is the leader's host, which chose the port."""
    master_address: str
    master_port: int
    timeout_s: float


class Start(Struct, frozen=True, kw_only=True):
    attempt: int
    node_rank: int
    nodes: int
    ranks_per_host: int
    master_address: str
    master_port: int
    config: str
    """The trainer's CONFIG; unused if `run` is given."""
    drills: tuple[Drill, ...]
    resume: bool = True
    """From the newest checkpoint. False: start at step 0; existing checkpoints are of another run.
    """
    steps: int = 0
    """Steps of the whole job. A rank that returns 0 before the last one has not finished. 0: the
    number is unknown, and every rank that returns 0 has finished."""
    skip: tuple[Window, ...] = ()
    """Windows of data that are skipped on purpose."""
    lineage: int = 0
    """As in `HostMemory`."""
    copies: CopyPlan | None = None
    """What the host does with checkpoints in memory; None: there are none."""
    pace: SavePace = field(default_factory=SavePace)
    classes: tuple[FailureRule, ...] = ()
    """The failure classes of the spec, also used to classify lines of the host's kernel log."""
    run: RunSpec | None = None
    """The user's own program, in place of the bundled trainer."""
    keep: Keep | None = None
    """Which checkpoints of the program are kept."""
    capture: Capture | None = None
    """The copy of the program that ranks run; None: they run it where it is."""
    keep_ranks: bool = False
    """Ranks may outlive the attempt."""
    stop_grace: float = 0.0
    """Seconds from SIGTERM to SIGKILL for processes that finished ranks leave behind."""


class Prepare(Struct, frozen=True, kw_only=True):
    """Start ranks that wait for an attempt to join: this host may replace another one."""

    attempt: int
    """The one that trains on other hosts now."""
    ranks_per_host: int
    config: str
    """As in `Start`."""


class Stop(Struct, frozen=True, kw_only=True):
    attempt: int
    grace_s: float
    keep_ranks: bool = False
    """As in `StopAttempt`."""
    in_memory: bool = False
    """As in `StopAttempt`."""


class Save(Struct, frozen=True, kw_only=True):
    """As `SaveCheckpoint`."""

    attempt: int


class Gather(Struct, frozen=True, kw_only=True):
    attempt: int
    timeout_s: float
    ended: bool = False
    """The attempt is over: collect what the ranks wrote when they ended."""
    for_a_person: bool = False
    """Someone asks where the ranks are. The ranks go on, and the answer is no evidence of a hang.
    """


class ProfileRanks(Struct, frozen=True, kw_only=True):
    """Have some ranks of this host profile their next steps."""

    attempt: int
    request: str
    """Id of the request. The order may come again after a reconnection."""
    ranks: tuple[int, ...]
    """Ranks of the job; those of other hosts are not meant."""
    steps: int


class Leave(Struct, frozen=True, kw_only=True):
    """Stop and exit, because the job is over or its hosts are given back."""

    reason: str
    again: bool = False
    """Another agent must start in the place of this one, so exit with a code that is retried: after
    exit code 0 no scheduler starts the agent again. A pod of the job's next run may also have
    connected to the leader of this run."""


Order = (
    Pulse
    | OfferPort
    | OfferSlots
    | CheckFabric
    | Start
    | Prepare
    | Stop
    | Save
    | Gather
    | ProfileRanks
    | Leave
)

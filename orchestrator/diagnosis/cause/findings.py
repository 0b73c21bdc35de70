"""Everything that is known so far about a failure of the present attempt."""

from msgspec import Struct

from orchestrator.contract.launch import Breakdown
from orchestrator.contract.messages.events import (
    AgentLost,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HostStopped,
    RankExited,
)


class Findings(Struct, frozen=True, kw_only=True):
    """Signs of one failure, in the order in which they came. `diagnose` turns them into a verdict
    when the attempt has ended."""

    opened_at: float
    """When the first sign was seen."""
    exits: tuple[RankExited, ...] = ()
    lost: tuple[AgentLost, ...] = ()
    left: tuple[AgentLost, ...] = ()
    """Hosts that were lost while the job left its hosts, as the scheduler wished. That is expected,
    so no such loss blames a host. But a host that was lost together with them is not alone."""
    returned: tuple[str, ...] = ()
    """Hosts among `lost` whose agent was alive all the time, and is heard again."""
    hang: HangDetected | None = None
    idle: bool = False
    """No rank ran when the first sign was seen: a host was lost between two attempts."""
    evidence: tuple[EvidenceGathered, ...] = ()
    judged: HangJudged | None = None
    """The result of the analysis of `evidence`."""
    judge_by: float | None = None
    """The deadline for `judged`; None where no analysis was asked for."""
    asked_after: bool = False
    """Evidence was asked for after the last rank had ended."""
    stopped: tuple[HostStopped, ...] = ()
    stuck: tuple[AgentLost, ...] = ()
    """Hosts that were given up because their ranks did not end. This is seldom the cause."""
    broke: Breakdown | None = None
    """What ended the allocation, or all agents in it."""
    leader_lost: float | None = None
    """When the former leader was last heard, if the attempt has no end."""
    leader_host: str | None = None
    """The host of that leader; None on a backend where all processes share one host."""
    leader_ended: str = ""
    """How that leader ended, where a later one found out."""
    leader_host_works: bool = False
    """Its host has shown since then that it works, so it is no culprit."""
    noticed_at: float = 0.0
    """When the loss of the leader was noticed."""
    before_cancel: bool = False
    """The first sign came before a person cancelled the job."""

"""What is known so far of the trouble of the present attempt."""

from dataclasses import dataclass

from orchestrator.contract.launch import Breakdown
from orchestrator.contract.messages.events import (
    AgentLost,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HostStopped,
    RankExited,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is known so far of the trouble of the present attempt."""

    opened_at: float
    """When the first sign of it was seen."""
    exits: tuple[RankExited, ...] = ()
    lost: tuple[AgentLost, ...] = ()
    returned: tuple[str, ...] = ()
    """Hosts among these whose agent was there all the time, and is heard again."""
    hang: HangDetected | None = None
    idle: bool = False
    """No rank ran when the first sign was seen: a host was lost between two attempts."""
    evidence: tuple[EvidenceGathered, ...] = ()
    judged: HangJudged | None = None
    """What the evidence amounts to."""
    judge_by: float | None = None
    """When that is waited for no longer; None where nobody was asked."""
    asked_after: bool = False
    """Evidence was asked for after the last rank had ended."""
    stopped: tuple[HostStopped, ...] = ()
    stuck: tuple[AgentLost, ...] = ()
    """Hosts given up because their ranks did not end: seldom the cause."""
    broke: Breakdown | None = None
    """What ended the allocation, or all agents in it."""
    leader_lost: float | None = None
    """When the former leader was last heard, where the attempt has no end."""
    leader_host: str | None = None
    """Where it ran, if that host is not the only one there is."""
    leader_ended: str = ""
    """How, where that was looked at."""
    noticed_at: float = 0.0
    """When that was noticed."""
    before_cancel: bool = False
    """Of a job that somebody cancelled: it was in trouble before."""

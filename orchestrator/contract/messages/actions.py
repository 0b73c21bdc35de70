"""Actions that `step` decides: commands that are idempotent per attempt, each with its reason."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.drills import Drill

Ending = Literal["SUCCEEDED", "FAILED", "CANCELLED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAttempt:
    attempt: int
    hosts: tuple[str, ...]
    """In node-rank order."""
    plan: int
    """Number of the plan that the ranks follow."""
    drills: tuple[Drill, ...]
    reason: str
    skip: tuple[Window, ...] = ()
    """Windows of data that are skipped on purpose."""
    crossing: tuple[int, ...] = ()
    """Placement cost of these hosts: bytes per step that leave a host, a leaf, a spine, and so on.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAttempt:
    """Send SIGTERM to every rank, and SIGKILL after the grace period."""

    attempt: int
    grace_s: float
    reason: str
    hosts: tuple[str, ...] = ()
    """Hosts on which an ended attempt may have left ranks; empty: the hosts of the current one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherEvidence:
    attempt: int
    timeout_s: float
    reason: str
    ended: bool = False
    """The attempt is over: collect what its ranks wrote when they ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeHang:
    """Analyse the evidence received so far while the ranks are being stopped."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceAgent:
    """Ask the backend for a new agent for a host whose agent is gone."""

    host: str
    reason: str
    elsewhere: bool = False
    """On any other host. The bad host's own agent may still be alive."""
    shut: bool = False
    """The scheduler itself keeps jobs off the bad host, for a time that it decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Every agent exits, and the allocation is given back."""

    state: Ending
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHosts:
    """Check the hosts together with one small all-reduce."""

    check: int
    hosts: tuple[str, ...]
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Search a plan for fewer hosts, or for less memory, at the same global batch."""

    hosts: int
    reason: str
    device_bytes: int | None = None
    """Measured memory of a device, after the current plan did not fit; None: as in the profile."""
    adopt: bool = True
    """The job continues with the new plan. False: only the alternatives are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """Every agent exits, and the scheduler is asked for other hosts."""

    exclude: tuple[str, ...]
    reason: str
    whole: bool = True
    """Give back all hosts. False: only the leader's host; the others wait for the next leader."""
    again: tuple[str, ...] = ()
    """Hosts that were excluded before and that the scheduler may grant again."""


Action = (
    StartAttempt
    | StopAttempt
    | GatherEvidence
    | JudgeHang
    | ReplaceAgent
    | CheckHosts
    | Replan
    | Requeue
    | EndJob
)

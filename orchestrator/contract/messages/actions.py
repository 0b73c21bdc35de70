"""What the supervisor orders: imperative, idempotent by attempt, each with its reason."""

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
    """Number of the plan by which its ranks run."""
    drills: tuple[Drill, ...]
    reason: str
    skip: tuple[Window, ...] = ()
    """Data that is left out on purpose."""
    crossing: tuple[int, ...] = ()
    """What these hosts cost: bytes of a step that leave a host, a leaf, a spine, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAttempt:
    """SIGTERM to every rank, SIGKILL after the grace."""

    attempt: int
    grace_s: float
    reason: str
    hosts: tuple[str, ...] = ()
    """Where an attempt that is over may have left ranks; empty: wherever the present one runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherEvidence:
    attempt: int
    timeout_s: float
    reason: str
    ended: bool = False
    """Of an attempt that is over: what its ranks wrote as they ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeHang:
    """Say what the evidence that has come amounts to, while the ranks are being stopped."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceAgent:
    """Ask the backend for a new agent on a host whose agent is gone."""

    host: str
    reason: str
    elsewhere: bool = False
    """In the place of a host that is no good, whose agent may well live: on any other host."""
    shut: bool = False
    """That one the scheduler itself keeps others from, for as long as it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Every agent leaves; the allocation is given back."""

    state: Ending
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHosts:
    """Try the hosts together: one small all-reduce."""

    check: int
    hosts: tuple[str, ...]
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Look for a plan for fewer hosts, or for less memory, at the same global batch."""

    hosts: int
    reason: str
    device_bytes: int | None = None
    """What a device has, now that the present plan did not fit into it; None: as was believed."""
    adopt: bool = True
    """The job goes on with it; or else only the ways out are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """Every agent leaves; the scheduler is asked for other hosts."""

    exclude: tuple[str, ...]
    reason: str
    whole: bool = True
    """Or else the leader's host alone is given back, and the others wait for the next leader."""
    again: tuple[str, ...] = ()
    """Hosts that the scheduler was asked to leave out before, and need not any more."""


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

"""What the supervisor orders: imperative, idempotent by attempt, each with its reason."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.drills import Drill

Ending = Literal["SUCCEEDED", "FAILED", "CANCELLED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAttempt:
    attempt: int
    hosts: tuple[str, ...]
    """In node-rank order."""
    drills: tuple[Drill, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAttempt:
    """SIGTERM to every rank, SIGKILL after the grace."""

    attempt: int
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherEvidence:
    attempt: int
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceAgent:
    """Ask the backend for a new agent on a host whose agent is gone."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Every agent leaves; the allocation is given back."""

    state: Ending
    reason: str


Action = StartAttempt | StopAttempt | GatherEvidence | ReplaceAgent | EndJob

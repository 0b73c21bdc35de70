"""Where the world comes in: Protocols that `system.py` and backends implement, and tests play."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.contract.launch import LaunchPlan


class Clock(Protocol):
    def now(self) -> float:
        """Unix seconds; may jump."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Completed:
    code: int
    out: str
    err: str


class Shell(Protocol):
    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        """Run a command to its end. Raises TimeoutError; a missing program is code 127."""


class Backend(Protocol):
    """How a launch becomes agents on hosts."""

    def describe(self, launch: LaunchPlan) -> str:
        """Exactly what `submit` would start, for a person to read."""

    def submit(self, launch: LaunchPlan) -> None:
        """Start one agent on each host, having made sure that none of an earlier launch is left."""

    def replace(self, launch: LaunchPlan, host: str) -> None:
        """Start the agent of one host again; called by the leader."""

    def clear(self, launch: LaunchPlan) -> None:
        """End every process of the job; returns when none is left."""

"""The stages of a job. Each is a value that holds what that stage alone needs.

Every stage has `since`, the time at which it began, and `reason`, why it was entered, ready to
print. A stage with a `deadline` has lasted too long at that time.
"""

from typing import ClassVar, Literal

from msgspec import Struct

from orchestrator.contract.messages.actions import Ending

State = Literal[
    "SUBMITTED",
    "PENDING",
    "STARTING",
    "RUNNING",
    "RECOVERING",
    "SUSPENDED",
    "SUCCEEDED",
    "FAILED",
    "CANCELLED",
]
"""The state of a job as the user sees it: `Run.state`."""


ENDED: tuple[State, ...] = ("SUCCEEDED", "FAILED", "CANCELLED")


# Each stage has a tag, so that a snapshot of the state says which one it has.
class Submitted(Struct, frozen=True, kw_only=True, tag=True):
    """No leader has started in this launch yet."""

    title: ClassVar = "submitted"
    since: float = 0.0
    reason: str = ""


class Waiting(Struct, frozen=True, kw_only=True, tag=True):
    """Agents register; the next attempt starts once there are enough usable hosts."""

    title: ClassVar = "waiting for agents"
    since: float
    reason: str
    deadline: float


class Holding(Struct, frozen=True, kw_only=True, tag=True):
    """A pause before a restart, because the failure may be transient. Agents may come and go."""

    title: ClassVar = "waiting before a restart"
    since: float
    reason: str
    deadline: float


class Checking(Struct, frozen=True, kw_only=True, tag=True):
    """All hosts run the check before the start together."""

    title: ClassVar = "checking hosts"
    since: float
    reason: str
    deadline: float
    hosts: tuple[str, ...]
    """Hosts that run the check, without those whose agent was lost since it began."""


class Starting(Struct, frozen=True, kw_only=True, tag=True):
    """Ranks start; none has finished a step of this attempt."""

    title: ClassVar = "starting ranks"
    since: float
    reason: str


class Running(Struct, frozen=True, kw_only=True, tag=True):
    title: ClassVar = "training"
    since: float
    reason: str


class Diagnosing(Struct, frozen=True, kw_only=True, tag=True):
    """Ranks hang; agents collect evidence while the ranks still run."""

    title: ClassVar = "gathering evidence"
    since: float
    reason: str
    deadline: float
    trained: bool
    """The attempt was in `Running` before. It returns there if the ranks make progress again, and
    else to `Starting`."""


class Stopping(Struct, frozen=True, kw_only=True, tag=True):
    """Agents stop the ranks. The attempt is concluded when no process is left."""

    title: ClassVar = "stopping ranks"
    since: float
    reason: str
    deadline: float


class Queued(Struct, frozen=True, kw_only=True, tag=True):
    """The allocation was given back, and the job is in the scheduler's queue again."""

    title: ClassVar = "back in the scheduler's queue"
    since: float
    reason: str


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    title: ClassVar = "ended"
    since: float
    reason: str
    ending: Ending


Stage = (
    Submitted
    | Waiting
    | Holding
    | Checking
    | Starting
    | Running
    | Diagnosing
    | Stopping
    | Queued
    | Ended
)

LIVE = (Starting, Running, Diagnosing)
"""An attempt is under way, and its ranks were not told to stop."""

ATTEMPT = (*LIVE, Stopping)
"""Ranks of an attempt may still run."""

IDLE = (Waiting, Holding, Checking)
"""Between two attempts: no rank runs."""

OUTSIDE = (Submitted, Queued, Ended)
"""The job has no agents."""

"""Where the state machine of a job stands."""

from enum import Enum
from typing import Literal

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


ENDED: tuple[State, ...] = ("SUCCEEDED", "FAILED", "CANCELLED")


class Stage(Enum):
    """Where the state machine stands; `Run.state` says it in the user's words."""

    SUBMITTED = "submitted"
    WAITING = "waiting for agents"
    HOLDING = "waiting before a restart"
    """For what may heal by itself; agents may come and go meanwhile."""
    CHECKING = "checking hosts"
    STARTING = "starting ranks"
    RUNNING = "training"
    DIAGNOSING = "gathering evidence"
    STOPPING = "stopping ranks"
    QUEUED = "back in the scheduler's queue"
    ENDED = "ended"


LIVE = (Stage.STARTING, Stage.RUNNING, Stage.DIAGNOSING)
"""An attempt is under way and has not been told to stop."""


IDLE = (Stage.WAITING, Stage.HOLDING, Stage.CHECKING)
"""Between two attempts: no rank runs."""


OUTSIDE = (Stage.SUBMITTED, Stage.QUEUED, Stage.ENDED)
"""No agent belongs to the job then."""

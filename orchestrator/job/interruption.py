"""Why an attempt stops, or why the next one does not start yet."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.launch import Cause
from orchestrator.contract.messages.events import StragglerFound
from orchestrator.diagnosis.cause.findings import Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """An orderly stop that is nobody's fault: ranks that end during it are expected to."""

    cause: Cause | Literal["growing"] | None
    """None while the scheduler has not been asked."""
    words: str
    requeue: bool = True
    """Or else the job goes on within its allocation, on other hosts."""
    straggler: StragglerFound | None = None
    """Whose host is given up."""

    @property
    def by_choice(self) -> bool:
        """The job's own: nobody takes hosts away, so what breaks meanwhile is a failure as ever."""
        return self.cause == "growing" or self.straggler is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """Why the attempt stops. It is no part of a stage, because it passes from one to the next:
    from `Diagnosing` to `Stopping`, and among the stages between two attempts."""

    findings: Findings | None = None
    """What is known of a failure that is not yet an incident."""
    leaving: Leaving | None = None
    cancelled_by: str | None = None

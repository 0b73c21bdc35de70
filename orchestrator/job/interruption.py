"""Why an attempt stops, or why the next one does not start yet."""

from typing import Literal

from msgspec import Struct

from orchestrator.contract.launch import Cause
from orchestrator.contract.messages.events import StragglerFound
from orchestrator.diagnosis.cause.findings import Findings


class Leaving(Struct, frozen=True, kw_only=True):
    """An orderly stop without a culprit. Ranks are expected to exit during it."""

    cause: Cause | Literal["growing"] | None
    """None until the scheduler has been asked."""
    words: str
    requeue: bool = True
    """False: the job continues within its allocation, on other hosts."""
    straggler: StragglerFound | None = None
    """The rank whose host is replaced."""
    warned: bool = False
    """Hosts are replaced that warn of their own failure."""
    by_drain: bool = False
    """A host is left that the scheduler drains. It stays until the job's allocation ends."""
    down: str = ""
    """The host that is left, if the scheduler says that it has failed."""

    @property
    def by_choice(self) -> bool:
        """The job stops by its own choice. No host is taken away, so a failure meanwhile has an
        incident."""
        return self.cause == "growing" or self.straggler is not None or self.warned


class Interruption(Struct, frozen=True, kw_only=True):
    """Why the attempt stops. It is not a part of a stage, because it passes from one to the next:
    from `Diagnosing` to `Stopping`, and through the stages between two attempts."""

    findings: Findings | None = None
    """Signs of a failure that is not yet an incident."""
    leaving: Leaving | None = None
    cancelled_by: str | None = None

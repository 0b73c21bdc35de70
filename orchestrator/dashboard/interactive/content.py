"""What the pages show, and who gets it. `app` implements `Services` with the same use cases as the
commands of the same names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.follow.newest_lines import NewestLines
from orchestrator.dashboard.interactive.places import Place
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.snapshot import Snapshot


class FleetContent(Struct, frozen=True, kw_only=True):
    rows: Sequence[JobRow]
    """In the order in which they are shown."""
    warnings: Sequence[str] = ()
    hidden: int = 0
    """Jobs that ended long ago, or whose run directories are gone."""


class JobContent(Struct, frozen=True, kw_only=True):
    view: View
    snapshot: Snapshot


Content = FleetContent | JobContent | NewestLines | None


class Source(Struct, frozen=True):
    """What must be read for a page. Pages of one job share what they read."""

    kind: str
    job: str = ""
    host: str = ""
    rank: int | None = None
    number: int = 0


class Reading(Struct, frozen=True, kw_only=True):
    """What is known of one source."""

    content: Content = None
    problem: str = ""
    """Why the last read failed."""
    busy_s: float = 0.0
    """Seconds since the running read began; 0: none runs."""


NOT_READ = Reading()
Readings = Mapping[Source, Reading]


def sources_of(place: Place) -> tuple[Source, ...]:
    job = Source("job", place.job)
    match place.kind:
        case "fleet":
            return (Source("fleet"),)
        case "rank":
            return (job, Source("logs", place.job, place.host, place.rank))
        case "logs":
            return (Source("logs", place.job, place.host, place.rank),)
        case "events":
            return (Source("events", place.job),)
        case "stacks":
            return (Source("stacks", place.job, number=place.number),)
        case "help":
            return ()
        case _:
            return (job,)


class Services(Protocol):
    """Everything here may block for as long as a file system or a cluster does."""

    def fleet(self) -> FleetContent:
        """All jobs. Raises NdctlError."""

    def open_job(self, job: str) -> Callable[[], JobContent]:
        """A function that reads what is new. Raises JobError if the submission has not finished."""

    def open_logs(self, job: str, host: str, rank: int | None) -> Callable[[], NewestLines]:
        """The logs of a rank, or of all ranks of a host, or of all hosts (`host` is empty)."""

    def open_events(self, job: str) -> Callable[[], NewestLines]: ...

    def stacks(self, job: str) -> NewestLines:
        """Where the ranks are now. Raises NdctlError."""

    def cancel(self, job: str) -> str:
        """Ask the job to end; says what was done. Raises NdctlError."""

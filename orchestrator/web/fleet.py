"""All jobs that the server shows. One thread at a time may look at them."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.reading.job_reader import JobReader, ReadJob
from orchestrator.errors import NdctlError
from orchestrator.seams import Clock, LaunchStatus

log = logging.getLogger(__name__)

Strikes = tuple[tuple[tuple[str, ...], float], ...]
"""Run root, cluster and host, each with the sum of the strikes against the host."""


class Place(Struct, frozen=True, kw_only=True):
    """A job and how to find it."""

    run_dir: RunDir
    commands: Commands | None = None
    idle: bool = False
    """It ended long ago: its row is among the others, and it is read only while it is wanted."""


class Others(Struct, frozen=True, kw_only=True):
    """What is known without reading a journal."""

    rows: tuple[JobRow, ...] = ()
    """Jobs that cannot be read, are gone, or ended long ago."""
    problem: str = ""
    """Why the list of jobs may be incomplete."""


Statuses = Callable[[Sequence[ReadJob]], Mapping[Path, LaunchStatus]]
"""Asks the schedulers about jobs without a leader. Run directory -> answer."""


class FleetState(Struct, frozen=True, kw_only=True):
    at: float = 0.0
    jobs: tuple[ReadJob, ...] = ()
    """In the order in which they were found."""
    unreadable: Mapping[Path, str] = field(default_factory=dict)
    """Run directory -> why its journal cannot be read."""
    strikes: Strikes = ()
    others: Others = Others()


WANTED_S = 60.0
"""An idle job is read for so long after it was last wanted."""


class Fleet:
    def __init__(
        self,
        places: Callable[[], Sequence[Place]],
        clock: Clock,
        statuses: Statuses = lambda jobs: {},
        strikes: Callable[[], Strikes] = tuple,
        others: Callable[[], Others] = Others,
        *,
        led: bool = False,
    ) -> None:
        """
        Args:
            places: finds all jobs. It is called at each look, so it may find new ones.
            led: this process is the leader of the jobs.
        """
        self.places, self.clock, self.statuses = places, clock, statuses
        self.strikes, self.others, self.led = strikes, others, led
        self.wanted: dict[Path, float] = {}
        """Idle jobs -> until when they are read, on the monotonic clock."""
        self.idle: frozenset[Path] = frozenset()
        self.readers: dict[Path, JobReader] = {}
        self.state = FleetState()

    def want(self, path: Path) -> None:
        """Read this job at the next looks, even if it ended long ago."""
        self.wanted[path] = self.clock.monotonic() + WANTED_S

    def idle_paths(self, run_dirs: Iterable[str]) -> list[Path]:
        """Those of these run directories that could be read, but ended long ago."""
        return [Path(one) for one in run_dirs if Path(one) in self.idle]

    def look(self) -> FleetState:
        """The present state of all jobs. May block on storage and schedulers."""
        self.state = self._look()
        return self.state

    def _look(self) -> FleetState:
        now, found, unreadable = self.clock.now(), list[ReadJob](), dict[Path, str]()
        known = self.places()
        self.idle = frozenset(place.run_dir.path for place in known if place.idle)
        places = [place for place in known if self._is_read(place)]
        for place in places:
            try:
                job = self._reader(place).look(now)
            except (OSError, NdctlError) as exc:  # one damaged job must not hide the others
                self.readers.pop(place.run_dir.path, None)
                unreadable[place.run_dir.path] = str(exc)
                continue
            if job is not None:
                found.append(job)
        self.readers = {
            place.run_dir.path: self.readers[place.run_dir.path]
            for place in places
            if place.run_dir.path in self.readers
        }
        for path, why in unreadable.items():
            if path not in self.state.unreadable:
                log.warning("failed to read job %s: %s", path, why)
        return FleetState(
            at=now,
            jobs=self._with_schedulers(found),
            unreadable=unreadable,
            strikes=self.strikes(),
            others=self.others(),
        )

    def _is_read(self, place: Place) -> bool:
        if not place.idle:
            return True
        if self.wanted.get(place.run_dir.path, 0.0) >= self.clock.monotonic():
            return True
        self.wanted.pop(place.run_dir.path, None)
        return False

    def _reader(self, place: Place) -> JobReader:
        path = place.run_dir.path
        known = self.readers.get(path)
        # `submit --new` starts a new journal in the same place.
        if known is None or not known.is_current():
            self.readers[path] = JobReader(place.run_dir, place.commands, led=self.led)
        return self.readers[path]

    def _with_schedulers(self, jobs: list[ReadJob]) -> tuple[ReadJob, ...]:
        told = self.statuses(jobs)
        return tuple(
            replace(job, snapshot=replace(job.snapshot, launch_status=told[job.path]))
            if job.path in told
            else job
            for job in jobs
        )

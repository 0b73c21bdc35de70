"""All jobs that the server shows. One thread at a time may look at them.

Each job is read by a thread of a crew, so storage of one job that hangs delays no other job.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard import format
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.reading.job_reader import JobReader, ReadJob
from orchestrator.errors import NdctlError
from orchestrator.posix.crew import Crew
from orchestrator.seams import Clock, LaunchStatus

log = logging.getLogger(__name__)

Strikes = tuple[tuple[tuple[str, ...], float], ...]
"""Run root, cluster and host, each with the sum of the strikes against the host."""


class Place(Struct, frozen=True, kw_only=True):
    """A job and how to find it."""

    run_dir: RunDir
    commands: Callable[[], Commands | None] = lambda: None
    """May block on storage, as all reading may."""
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
    behind: int = 0
    """Jobs that are shown as they were at an earlier look."""
    strikes: Strikes = ()
    others: Others = Others()

    def run_dirs(self) -> list[str]:
        """Each job once."""
        paths = [*(str(job.path) for job in self.jobs), *map(str, self.unreadable)]
        return list(dict.fromkeys([*(row.run_dir for row in self.others.rows), *paths]))

    def job(self, run_dir: str) -> ReadJob | None:
        """None if the job was not read."""
        return next((job for job in self.jobs if str(job.path) == run_dir), None)


WANTED_S = 60.0
"""An idle job is read for so long after it was last wanted."""
LOOK_S = 5.0
"""What was not read within this time is shown as it was."""
LATE_S = 30.0
"""If a job's storage does not respond for so long, the job is shown as unreadable."""

T = TypeVar("T")


class Fleet:
    limit_s = LOOK_S
    """Limit of a look."""

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
        self.crew = Crew()
        self.readers: dict[Path, JobReader] = {}
        self.read: dict[Path, ReadJob | str | None] = {}
        """What the last reading of each job found: the job, why it cannot be read, or that its
        submission has not finished."""
        self.answers: dict[str, Any] = {}
        """The last answers of `places` and so on, or the errors that they raised."""
        self.unreadable: frozenset[Path] = frozenset()

    def want(self, path: Path) -> None:
        """Read this job at the next looks, even if it ended long ago."""
        self.wanted[path] = self.clock.monotonic() + WANTED_S

    def idle_paths(self, run_dirs: Iterable[str]) -> list[Path]:
        """Those of these run directories that could be read, but ended long ago."""
        return [Path(one) for one in run_dirs if Path(one) in self.idle]

    def look(self) -> FleetState:
        """The state of all jobs, as far as storage and schedulers respond within the limit.

        Raises OSError and NdctlError if the jobs cannot be listed.
        """
        until, now = time.monotonic() + self.limit_s, self.clock.now()
        nothing: Sequence[Place] = ()
        known = self._ask("places", self.places, nothing, until)
        self.idle = frozenset(place.run_dir.path for place in known if place.idle)
        places = {place.run_dir.path: place for place in known if self._is_read(place)}
        for path, place in places.items():
            self.crew.give(path, partial(self._read, place), path.parent)
        self.crew.wait(until - time.monotonic())
        late = self.crew.unfinished()
        self._forget_all_but(places)
        lost = {root for root in {path.parent for path in places} if self.crew.is_lost(root)}
        unreadable = {
            path: why for path in places if (why := self._why_not(path, path.parent in lost, now))
        }
        found = [self.read.get(path) for path in places if path not in unreadable]
        jobs = [one for one in found if isinstance(one, ReadJob)]
        return FleetState(
            at=now,
            jobs=self._with_schedulers(jobs, until),
            unreadable=unreadable,
            behind=sum(job.path in late or job.path.parent in lost for job in jobs),
            strikes=self._ask("strikes", self.strikes, (), until),
            others=self._others(until),
        )

    def _ask(self, name: str, call: Callable[[], T], first: T, until: float) -> T:
        """The newest answer; the one before while `call` takes long, or `first`."""

        def work() -> None:
            try:
                self.answers[name] = call()
            except (OSError, NdctlError) as exc:
                self.answers[name] = exc

        self.crew.give(name, work)
        self.crew.wait(until - time.monotonic())
        answer: T | Exception = self.answers.get(name, first)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _others(self, until: float) -> Others:
        others = self._ask("others", self.others, Others(), until)
        late_s = self.crew.busy_s("places")
        if "places" not in self.answers:
            problem = "the jobs are still being listed for the first time"
        elif late_s >= LATE_S:
            problem = f"the file system has not listed the jobs for {format.duration(late_s)}"
        else:
            return others
        return replace(others, problem="; ".join(filter(None, (others.problem, problem))))

    def _read(self, place: Place) -> None:
        path = place.run_dir.path
        try:
            self.read[path] = self._reader(place).look(self.clock.now())
        except Exception as exc:  # noqa: BLE001 - one damaged job must not hide the others
            self.readers.pop(path, None)
            self.read[path] = str(exc) or type(exc).__name__
            if path not in self.unreadable:
                log.warning("failed to read job %s: %s", path, exc)

    def _why_not(self, path: Path, is_lost: bool, now: float) -> str:
        """Why the job cannot be shown; empty: it can. `is_lost`: the storage of its run root is."""
        known, late_s = self.read.get(path), self.crew.busy_s(path)
        if is_lost and isinstance(known, ReadJob):
            late_s = max(late_s, now - known.snapshot.now)
        if late_s >= LATE_S:
            return f"its file system has not responded for {format.duration(late_s)}"
        if path not in self.read:
            return "its file system does not respond" if is_lost else "it is still being read"
        return known if isinstance(known, str) else ""

    def _forget_all_but(self, places: Mapping[Path, Place]) -> None:
        self.unreadable = frozenset(path for path in places if isinstance(self.read.get(path), str))
        for known in (self.readers, self.read):
            for path in list(known):  # a copy: the crew may add to it
                if path not in places:
                    known.pop(path, None)

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
            known = self.readers[path] = JobReader(place.run_dir, place.commands(), led=self.led)
        return known

    def _with_schedulers(self, jobs: list[ReadJob], until: float) -> tuple[ReadJob, ...]:
        nothing: Mapping[Path, LaunchStatus] = {}
        told = self._ask("statuses", partial(self.statuses, jobs), nothing, until)
        return tuple(
            replace(job, snapshot=replace(job.snapshot, launch_status=told[job.path]))
            if job.path in told
            else job
            for job in jobs
        )

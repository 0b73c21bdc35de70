"""From the state of all jobs and an address to a page."""

from collections.abc import Hashable
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.measured.steady import Steady, attempts_of_plan, read_steady
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.job.incident import Incident
from orchestrator.plan.page.markup import Markup, element
from orchestrator.web.fleet import FleetState
from orchestrator.web.pages.address import Address, job_path, meant, name_of
from orchestrator.web.pages.entries import Found, around, newest
from orchestrator.web.pages.fleet_page import fleet_page, rows_of
from orchestrator.web.pages.incident_page import incident_page
from orchestrator.web.pages.job_page import MOST_EVENTS, job_page
from orchestrator.web.pages.page import Page, Rows, block, row

CHARTS_S = 5.0
"""A browser gets new points at most so often, because a message has all points."""
MOST_KEPT = 64
"""Jobs and incidents whose lines are kept."""
MOST_TIMELINE = 300

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Forms(Protocol):
    """What a person may do on the page of a job, beside reading."""

    def __call__(self, job: ReadJob, *, alone: bool) -> Rows: ...


def no_forms(job: ReadJob, *, alone: bool) -> Rows:
    return {}


class Lines(Struct, frozen=True, kw_only=True):
    """What a page shows of the files of a job, besides what each look reads."""

    found: Found
    """The newest journal entries, or those around an incident."""
    steady: Steady | None = None


class Renderer:
    """Keeps what is costly to make again.

    `lines` reads files, so it may hang: it is called by one thread for each job. `page` only
    computes, and is called by one thread.
    """

    def __init__(self, forms: Forms = no_forms) -> None:
        self.forms = forms
        self.lines_kept: Kept[tuple[Path, int | None], tuple[Hashable, Lines]] = Kept()
        self.charts: Kept[Path, tuple[float, bytes]] = Kept()

    def lines(self, job: ReadJob, incident: int | None) -> Lines | None:
        """For the page of a job, or of one of its incidents; None: there is no such incident.

        Raises OSError.
        """
        last, key = job.snapshot.progress.last, (job.path, incident)
        stamp = (job.lines, None if last is None or incident is not None else last.step)
        known = self.lines_kept.get(key)
        if known is not None and known[0] == stamp:
            return known[1]
        if incident is None:
            found = newest(job.snapshot.run_dir.journal, MOST_EVENTS, job.lines)
            lines = Lines(found=found, steady=_steady(job))
        elif (told := _incident(job, incident)) is not None:
            lines = Lines(found=around(job.snapshot.run_dir.journal, told, MOST_TIMELINE))
        else:
            return None
        self.lines_kept.put(key, (stamp, lines))
        return lines

    def known_lines(self, job: ReadJob, incident: int | None) -> Lines | None:
        """The last lines that were read."""
        known = self.lines_kept.get((job.path, incident))
        return None if known is None else known[1]

    def page(self, state: FleetState, address: Address, lines: Lines | str | None) -> Page:
        """The page at `address`, also if there is no such job.

        Args:
            lines: of the job; text: why they cannot be read.
        """
        if address.name is None:
            return fleet_page(state, everything=address.everything)
        run_dirs = state.run_dirs()
        found = meant(run_dirs, address)
        if len(found) != 1:
            return _choice(state, found, address)
        job = state.job(found[0])
        if job is None or isinstance(lines, str):
            row = next(one for one in rows_of(state) if one.run_dir == found[0])
            return _unread(replace(row, job=None, problem=lines) if isinstance(lines, str) else row)
        alone = sum(name_of(one) == job.path.name for one in run_dirs) == 1
        return self._of_job(job, address.incident, lines, alone=alone)

    def _of_job(
        self, job: ReadJob, number: int | None, lines: Lines | None, *, alone: bool
    ) -> Page:
        incident = None if number is None else _incident(job, number)
        if lines is None or (number is not None and incident is None):
            said = f"Job {job.path.name} has no incident {number}."
            return notice("no such incident", said, 404, (job_path(job.path, alone=alone), "job"))
        if incident is not None:
            return incident_page(job, incident, lines.found, alone=alone)
        job = replace(job, snapshot=replace(job.snapshot, steady=lines.steady))
        page = job_page(job, lines.found, alone=alone, forms=self.forms(job, alone=alone))
        return replace(page, charts=self._charts(job, page.charts))

    def _charts(self, job: ReadJob, charts: bytes) -> bytes:
        known, now = self.charts.get(job.path), job.snapshot.now
        if known is None or not 0 <= now - known[0] < CHARTS_S:
            known = (now, charts)
            self.charts.put(job.path, known)
        return known[1]


def job_at(state: FleetState, address: Address) -> ReadJob | None:
    """The job of an address; None if there is none, or several, or it was not read."""
    found = [] if address.name is None else meant(state.run_dirs(), address)
    return state.job(found[0]) if len(found) == 1 else None


def _incident(job: ReadJob, number: int) -> Incident | None:
    known = job.snapshot.seen.run.history.incidents
    return next((one for one in known if one.id == number), None)


def _steady(job: ReadJob) -> Steady | None:
    run = job.snapshot.seen.run
    if job.snapshot.progress.last is None or run.plan.is_own:
        return None
    return read_steady(job.snapshot.run_dir.metrics, attempts_of_plan(run))


class Kept(Generic[Key, Value]):
    """The newest values, for several threads."""

    def __init__(self) -> None:
        self._kept: dict[Key, Value] = {}
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        return self._kept.get(key)

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = value
            while len(self._kept) > MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))


def _choice(state: FleetState, found: list[str], address: Address) -> Page:
    if not found:
        said = f"No job {address.name} is known here: it was removed, or its name is another."
        if state.others.problem:
            said = f"No job {address.name} is known here yet: {state.others.problem}."
        return notice("no such job", said, 404, ("/", "all jobs"))
    links = {
        f"c{number}": row("p", f"c{number}", _link(one, address.incident), f" of {one.user}")
        for number, one in enumerate(one for one in rows_of(state) if one.run_dir in found)
    }
    said = row("p", "said", f"{len(found)} jobs have the name {address.name}:")
    return _of_rows(f"{address.name}: which one?", {"said": said, **links}, 300)


def _link(one: JobRow, incident: int | None) -> Markup:
    path = job_path(one.run_dir, alone=False, incident=incident)
    return element("a", one.run_dir, href=path)


def _unread(one: JobRow) -> Page:
    """A job that is listed but cannot be read."""
    return notice(f"{one.name}: {one.state}", one.note, 200, ("/", "all jobs"))


def notice(title: str, text: str, status: int, link: tuple[str, str]) -> Page:
    path, words = link
    rows = {
        "title": row("h2", "title", title),
        "said": row("p", "said", text),
        "link": row("p", "link", element("a", words, href=path)),
    }
    return _of_rows(title, rows, status)


def _of_rows(title: str, rows: Rows, status: int) -> Page:
    return Page(
        title=title,
        status=status,
        blocks={"notice": rows},
        layout=lambda blocks: element("main", block("div", "notice", blocks["notice"])),
    )

"""From the state of all jobs and an address to a page. Keeps what is costly to make again."""

from collections.abc import Hashable
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec.structs import replace

from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.dashboard.measured.steady import Steady, attempts_of_plan, read_steady
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.plan.page.markup import Markup, element
from orchestrator.web.fleet import FleetState
from orchestrator.web.pages.address import Address, job_path, meant
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


class Renderer:
    """Used by one thread at a time."""

    def __init__(self, forms: Forms = no_forms) -> None:
        self.forms = forms
        self.events: dict[Path, tuple[int, Found]] = {}
        self.timelines: dict[tuple[Path, int], tuple[int, Found]] = {}
        self.steady: dict[Path, tuple[int, Steady | None]] = {}
        self.charts: dict[Path, tuple[float, bytes]] = {}

    def page(self, state: FleetState, address: Address) -> Page:
        """The page at `address`, also if there is no such job."""
        if address.name is None:
            return fleet_page(state, everything=address.everything)
        rows = rows_of(state)
        found = meant(rows, address)
        if len(found) != 1:
            return _choice(rows, found, address)
        job = next((job for job in state.jobs if str(job.path) == found[0].run_dir), None)
        if job is None:
            return _unread(found[0])
        alone = sum(one.name == found[0].name for one in rows) == 1
        try:
            return self._of_job(job, address, alone=alone)
        except OSError as exc:  # the run directory was removed since the look
            return _unread(replace(found[0], job=None, problem=str(exc)))

    def _of_job(self, job: ReadJob, address: Address, *, alone: bool) -> Page:
        incidents = job.snapshot.seen.run.history.incidents
        if address.incident is None:
            job = replace(job, snapshot=replace(job.snapshot, steady=self._steady(job)))
            page = job_page(job, self._newest(job), alone=alone, forms=self.forms(job, alone=alone))
            return replace(page, charts=self._charts(job, page.charts))
        incident = next((one for one in incidents if one.id == address.incident), None)
        if incident is None:
            said = f"Job {job.path.name} has no incident {address.incident}."
            return notice("no such incident", said, 404, (job_path(job.path, alone=alone), "job"))
        key = (job.path, incident.id)
        known = self.timelines.get(key)
        if known is None or known[0] != job.lines:
            found = around(job.snapshot.run_dir.journal, incident, MOST_TIMELINE)
            known = _keep(self.timelines, key, (job.lines, found))
        return incident_page(job, incident, known[1], alone=alone)

    def _newest(self, job: ReadJob) -> Found:
        known = self.events.get(job.path)
        if known is None or known[0] != job.lines:
            found = newest(job.snapshot.run_dir.journal, MOST_EVENTS)
            known = _keep(self.events, job.path, (job.lines, found))
        return known[1]

    def _steady(self, job: ReadJob) -> Steady | None:
        last, run = job.snapshot.progress.last, job.snapshot.seen.run
        if last is None or run.plan.is_own:
            return None
        known = self.steady.get(job.path)
        if known is None or known[0] != last.step:
            steady = read_steady(job.snapshot.run_dir.metrics, attempts_of_plan(run))
            known = _keep(self.steady, job.path, (last.step, steady))
        return known[1]

    def _charts(self, job: ReadJob, charts: bytes) -> bytes:
        known, now = self.charts.get(job.path), job.snapshot.now
        if known is None or not 0 <= now - known[0] < CHARTS_S:
            known = _keep(self.charts, job.path, (now, charts))
        return known[1]


def _keep(kept: dict[Key, Value], key: Key, value: Value) -> Value:
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > MOST_KEPT:
        kept.pop(next(iter(kept)))
    return value


def _choice(rows: list[JobRow], found: list[JobRow], address: Address) -> Page:
    if not found:
        said = f"No job {address.name} is known here: it was removed, or its name is another."
        return notice("no such job", said, 404, ("/", "all jobs"))
    links = {
        f"c{number}": row("p", f"c{number}", _link(one, address.incident), f" of {one.user}")
        for number, one in enumerate(found)
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

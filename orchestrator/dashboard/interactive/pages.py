"""Draws each page from what was read and the size of the screen. Pure."""

from collections.abc import Callable, Mapping
from datetime import tzinfo

from msgspec import Struct
from rich.text import Text

from orchestrator.dashboard import format
from orchestrator.dashboard.follow.newest_lines import NewestLines
from orchestrator.dashboard.interactive.content import (
    NOT_READ,
    FleetContent,
    JobContent,
    Reading,
    Readings,
    sources_of,
)
from orchestrator.dashboard.interactive.fleet_page import fleet_page
from orchestrator.dashboard.interactive.host_pages import host_page, hosts_page, rank_page
from orchestrator.dashboard.interactive.job_pages import cancel_page, incident_page, metrics_page
from orchestrator.dashboard.interactive.keys import footer
from orchestrator.dashboard.interactive.page import Page
from orchestrator.dashboard.interactive.places import Kind, Place
from orchestrator.dashboard.interactive.text_page import help_lines, text_page
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.screen.rows import Frame, framed, plain
from orchestrator.dashboard.screen.screen import frame as job_frame
from orchestrator.dashboard.theme import BOLD, DIM

SLOW_S = 3.0
"""A read that takes longer is mentioned."""


class Sight(Struct, frozen=True, kw_only=True):
    """Everything that decides what is on the screen."""

    place: Place
    is_first: bool
    """There is no page below this one."""
    readings: Readings
    message: str
    """What the last action said."""
    now: float
    zone: tzinfo | None


def draw_page(sight: Sight, width: int, height: int) -> Frame:
    """Exactly `height` lines of `width` cells."""
    place = sight.place
    readings = [sight.readings.get(source, NOT_READ) for source in sources_of(place)]
    page = Page(
        place=place,
        width=width,
        height=height,
        now=sight.now,
        zone=sight.zone,
        footer=_footer(sight, readings, width),
    )
    if any(one.content is None for one in readings[:1]):
        return _nothing_yet(page, readings[0])
    content = readings[0].content if readings else None
    match content:
        case FleetContent():
            return fleet_page(page, content)
        case JobContent():
            return _of_job(page, content, readings)
        case NewestLines():
            return text_page(page, _title(place), content)
        case _:
            return text_page(page, "help", NewestLines(lines=help_lines(width), dropped=0))


def _of_job(page: Page, content: JobContent, readings: list[Reading]) -> Frame:
    if page.place.kind == "job":
        view, place = content.view, page.place
        return job_frame(view, page.width, page.height, page.zone, page.footer, place.selected)
    if page.place.kind == "rank":
        logs = readings[1].content
        return rank_page(
            page,
            content,
            logs if isinstance(logs, NewestLines) else NewestLines(lines=(), dropped=0),
        )
    return PAGES[page.place.kind](page, content)


PAGES: Mapping[Kind, Callable[[Page, JobContent], Frame]] = {
    "hosts": hosts_page,
    "host": host_page,
    "incident": incident_page,
    "metrics": metrics_page,
    "cancel": cancel_page,
}


def _title(place: Place) -> str:
    if place.kind == "logs":
        if place.rank is not None:
            return f"logs of rank {place.rank}"
        return f"logs of {place.host}" if place.host else "logs of all ranks"
    return {"events": "events", "stacks": "where the ranks are"}.get(place.kind, place.kind)


def _footer(sight: Sight, readings: list[Reading], width: int) -> Text:
    place = sight.place
    if place.typing:
        return Text.assemble(
            (" /", BOLD), place.needle, "█", ("   Enter keeps it, Esc ends it", DIM)
        )
    said = sight.message or next((one.problem for one in readings if one.problem), "")
    slow = max((one.busy_s for one in readings), default=0.0)
    if not said and slow > SLOW_S:
        said = f"reading for {format.duration(slow)}; what is shown is from before"
    if said:
        return Text(f" {format.one_line(said)}", style="bold yellow")
    return footer(place.kind, is_first=sight.is_first, width=width)


def _nothing_yet(page: Page, reading: Reading) -> Frame:
    if reading.problem:
        words = format.one_line(reading.problem)
    elif reading.busy_s > SLOW_S:
        words = (
            f"reading for {format.duration(reading.busy_s)}: the file system or the cluster does"
            " not answer yet"
        )
    else:
        words = "reading …"
    about = f" {format.one_line(page.place.job)}" if page.place.job else " all jobs"
    lines = [Text(about, style=DIM), Text(), *page.wrapped(words)]
    lines += [Text()] * (page.height - 1 - len(lines))
    return framed(plain([*lines[: page.height - 1], page.footer]), page.width, page.height)


__all__ = ["Sight", "View", "draw_page"]

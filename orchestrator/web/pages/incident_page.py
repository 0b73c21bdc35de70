"""The page of one incident: the evidence of `ndctl describe`, and the events around it."""

from collections.abc import Iterable, Iterator, Mapping

from orchestrator.dashboard.describe import Quoted, incident_facts, incident_title
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.status import Row
from orchestrator.job.incident import Incident
from orchestrator.plan.page.markup import Markup, element
from orchestrator.web.pages.address import job_path
from orchestrator.web.pages.entries import Found
from orchestrator.web.pages.job_page import event_rows, fact, head, text_of
from orchestrator.web.pages.page import Page, Rows, block, row, section


def incident_page(job: ReadJob, incident: Incident, found: Found, *, alone: bool) -> Page:
    """`found`: the journal entries around the incident."""
    snapshot = job.snapshot
    blocks: dict[str, Rows] = {
        "head": dict(head(snapshot)),
        "links": dict(_links(job, incident, alone=alone)),
        "incident": {"title": row("h2", "title", incident_title(incident, None))},
        "evidence": dict(_evidence(incident_facts(incident, snapshot))),
        "timeline": dict(event_rows(found.entries, newest_first=False)),
        "older": dict(_rest(snapshot, found)),
    }
    name = job.path.name
    title = f"{name} incident {incident.id}"
    return Page(title=title, blocks=blocks, layout=_layout, at=snapshot.now)


def _layout(blocks: Mapping[str, Rows]) -> Markup:
    return element(
        "main",
        block("div", "head", blocks["head"], class_="head"),
        block("nav", "links", blocks["links"], class_="counts"),
        block("div", "incident", blocks["incident"]),
        block("dl", "evidence", blocks["evidence"], class_="facts evidence"),
        section(
            "Timeline",
            block("ol", "timeline", blocks["timeline"], class_="events"),
            block("div", "older", blocks["older"], class_="notes"),
        ),
    )


def _links(job: ReadJob, incident: Incident, *, alone: bool) -> Iterator[tuple[str, Markup]]:
    yield "job", row("a", "job", f"job {job.path.name}", href=job_path(job.path, alone=alone))
    known = [one.id for one in job.snapshot.seen.run.history.incidents]
    place = known.index(incident.id)
    for key, at in (("previous", place - 1), ("next", place + 1)):
        if 0 <= at < len(known):
            path = job_path(job.path, alone=alone, incident=known[at])
            yield key, row("a", key, f"{key}: #{known[at]}", href=path)


def _evidence(rows: Iterable[Row]) -> Iterator[tuple[str, Markup]]:
    """A fact for each row; quoted lines as one text below their title."""
    pending: tuple[str, list[str]] | None = None
    number = 0
    for one in rows:
        if isinstance(one, Quoted) and pending is not None:
            pending[1].append(one.text)
            continue
        if pending is not None:
            yield _quote(number, *pending)
            number, pending = number + 1, None
        if one.label.strip() and not one.text:  # the title of lines that follow
            pending = (one.label.strip(), [])
            continue
        key = f"r{number}"
        yield key, fact(key, one.label.strip(), text_of(one))
        number += 1
    if pending is not None:
        yield _quote(number, *pending)


def _quote(number: int, title: str, lines: list[str]) -> tuple[str, Markup]:
    key = f"r{number}"
    return key, fact(key, title, element("pre", "\n".join(lines)))


def _rest(snapshot: Snapshot, found: Found) -> Iterator[tuple[str, Markup]]:
    if not found.complete:
        typed = element("code", snapshot.commands.of("events"))
        yield "rest", row("p", "rest", "There are more events: ", typed, class_="soft")

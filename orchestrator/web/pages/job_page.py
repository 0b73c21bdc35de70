"""The page of one job: what is wrong, what to type, how far it is, its hosts, what happened."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from orchestrator.dashboard import format
from orchestrator.dashboard.event_text import event_line, event_time, sort_by_time
from orchestrator.dashboard.job_view.health import UNHEALTHY, Health, HostRow, host_text
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.next_steps import next_step
from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.status import (
    Row,
    action_taken,
    age_text,
    is_open,
    lost_work,
    recovery_text,
    status_rows,
)
from orchestrator.job.incident import Incident
from orchestrator.journal.journal import Entry
from orchestrator.plan.page.markup import Markup, element
from orchestrator.web.pages.address import job_path
from orchestrator.web.pages.entries import Found
from orchestrator.web.pages.page import Page, Rows, block, row, section

MOST_EVENTS = 100
MOST_INCIDENTS = 100
FEW_HOSTS = 16
"""So many hosts have a row each, with their ranks. Of more, only the unhealthy ones have, and all
are on a map."""
MOST_HOSTS = 32
"""Rows of unhealthy hosts."""
MOST_MARKS = 200
"""Checkpoints and restarts on a chart."""
MOST_RANKS = 64
"""Ranks of an unhealthy host that are shown one by one."""
TROUBLE = ("unhealthy", "straggler")
OF_INCIDENT = ("incident", "ndctl did")
COMMANDS = ("see why",)
"""Labels of `ndctl status` whose texts are commands."""
INCIDENT_COLUMNS = {
    "number": "#",
    "when": "when",
    "what": "what",
    "cause": "cause",
    "culprit": "culprit",
    "did": "ndctl did",
    "cost": "cost",
}
"""Name of a column, by which the style sheet knows it -> its title."""


def job_page(job: ReadJob, found: Found, *, alone: bool, forms: Rows | None = None) -> Page:
    """
    Args:
        found: the newest journal entries.
        alone: no other job has this name.
        forms: what a person may do here, beside reading.
    """
    snapshot, shown = job.snapshot, job.snapshot.view
    said = status_rows(snapshot, None, job.time, shown)
    incidents = snapshot.seen.run.history.incidents
    blocks: dict[str, Rows] = {
        "head": dict(head(snapshot)),
        "trouble": dict(_trouble(job, said, alone=alone)),
        "facts": dict(_facts(said)),
        "unhealthy": dict(_unhealthy(shown)),
        "hosts": dict(_map(shown)),
        "health": dict(_health(shown)),
        "incidents": {
            f"i{one.id}": _incident_line(one, job, alone=alone)
            for one in reversed(incidents[-MOST_INCIDENTS:])
        },
        "events": dict(event_rows(found.entries)),
        "older": dict(_older(snapshot, found)),
        "forms": forms or {},
    }
    return Page(
        title=f"{shown.name}: {shown.state}",
        blocks=blocks,
        layout=_layout,
        at=snapshot.now,
        charts=charts_json(shown, job.saved_steps),
    )


def _layout(blocks: Mapping[str, Rows]) -> Markup:
    heads = [element("th", head, scope="col") for head in INCIDENT_COLUMNS.values()]
    incidents = element(
        "table",
        element("thead", element("tr", heads)),
        block("tbody", "incidents", blocks["incidents"]),
        class_="incidents",
    )
    return element(
        "main",
        block("div", "head", blocks["head"], class_="head"),
        block("dl", "trouble", blocks["trouble"], class_="facts trouble"),
        element(
            "div",
            block("dl", "facts", blocks["facts"], class_="facts"),
            element(
                "div",
                element("figure", id="chart-loss", class_="chart"),
                element("figure", id="chart-speed", class_="chart"),
                class_="charts",
            ),
            class_="columns",
        ),
        section(
            "Hosts",
            block("div", "health", blocks["health"], class_="counts"),
            block("dl", "unhealthy", blocks["unhealthy"], class_="facts unhealthy"),
            block("div", "hosts", blocks["hosts"], class_="map"),
        ),
        section("Incidents", element("div", incidents, class_="scroll")),
        section(
            "Events, newest first",
            block("ol", "events", blocks["events"], class_="events"),
            block("div", "older", blocks["older"], class_="notes"),
        ),
        block("div", "forms", blocks["forms"], class_="forms"),
    )


def head(snapshot: Snapshot) -> Iterator[tuple[str, Markup]]:
    """State, reason, fix, and what to type next."""
    standing = snapshot.standing
    why, fix = format.split_fix(standing.reason)
    age = age_text(snapshot, None)
    badge = element("span", standing.state, class_=f"state s-{standing.state.lower()}")
    aged = [element("span", age, class_="warn")] if age else []
    name = element("span", snapshot.run_dir.path.name, class_="name")
    said = element("span", why)
    yield "state", row("p", "state", name, badge, aged, said, class_="reason")
    if fix:
        yield "fix", row("p", "fix", element("b", "fix "), prose(fix))
    step = next_step(snapshot, None)
    yield "next", row("p", "next", element("b", "next "), command(step), class_="next")


def command(text: str) -> Markup:
    """Words, with the command at their end set apart so that one click selects it."""
    words, colon, typed = text.rpartition(": ")
    if not typed.startswith(("ndctl ", "cd ")):
        return element("span", text)
    return element("span", words + colon, element("code", typed))


def prose(text: str) -> list[Markup]:
    """Text in which commands stand between backticks, as in a terminal."""
    parts = text.split("`")
    # An odd number of backticks is no pair of quotes.
    if len(parts) % 2 == 0:
        return [element("span", text)]
    return [element("code" if number % 2 else "span", part) for number, part in enumerate(parts)]


def _trouble(job: ReadJob, said: Sequence[Row], *, alone: bool) -> Iterator[tuple[str, Markup]]:
    run, state = job.snapshot.seen.run, job.snapshot.standing.state
    last = run.history.incidents[-1] if run.history.incidents else None
    if verdict := job.snapshot.view.verdict:
        yield "verdict", fact("verdict", "verdict", element("span", verdict))
    in_trouble = last is not None and is_open(last, state)
    labels = (*TROUBLE, *OF_INCIDENT) if in_trouble else TROUBLE
    for number, one in enumerate(one for one in said if one.label in labels):
        key = f"t{number}"
        more: list[Markup] = []
        if last is not None and one.label == "incident":
            path = job_path(job.path, alone=alone, incident=last.id)
            more = [element("a", "evidence", href=path, class_="more")]
        yield key, fact(key, one.label, prose(one.text), more)


def _facts(said: Sequence[Row]) -> Iterator[tuple[str, Markup]]:
    """The rows of `ndctl status` that have no place of their own on the page."""
    elsewhere = (*TROUBLE, *OF_INCIDENT, "next")
    for number, one in enumerate(one for one in said if one.label not in elsewhere):
        key = f"f{number}"
        yield key, fact(key, one.label, text_of(one))


def text_of(one: Row) -> list[Markup]:
    return [element("code", one.text)] if one.label.strip() in COMMANDS else prose(one.text)


def fact(key: str, label: str, *content: Markup | Sequence[Markup]) -> Markup:
    """A row of a list of facts. Without a label it continues the row above."""
    return row("div", key, element("dt", label), element("dd", content_of(content)))


def content_of(content: Sequence[Markup | Sequence[Markup]]) -> list[Markup]:
    return [one for part in content for one in ([part] if isinstance(part, Markup) else part)]


def _unhealthy(shown: View) -> Iterator[tuple[str, Markup]]:
    """Hosts with each rank, the unhealthy ones first."""
    bad = [host for host in shown.hosts if host.worst in UNHEALTHY]
    if len(shown.hosts) <= FEW_HOSTS:
        bad += [host for host in shown.hosts if host.worst not in UNHEALTHY]
    for host in bad[:MOST_HOSTS]:
        ranks = [
            element("i", str(host.first_rank + place), class_=f"rank {health}", title=health)
            for place, health in enumerate(host.ranks[:MOST_RANKS])
        ]
        words = element("span", host_text(host), class_="soft")
        yield host_key(host), fact(host_key(host), host.name, ranks, words)
    if len(bad) > MOST_HOSTS:
        more = element("span", f"{len(bad) - MOST_HOSTS:,} more hosts, on the map below")
        yield "more", fact("more", "", more)


def _map(shown: View) -> Iterator[tuple[str, Markup]]:
    """There may be thousands of hosts, so each is one small element."""
    if len(shown.hosts) <= FEW_HOSTS:
        return
    for host in shown.hosts:
        last = host.first_rank + len(host.ranks) - 1
        said = f"{host.name}: ranks {host.first_rank}-{last}, {host_text(host)}"
        yield host_key(host), _cell(host_key(host), host.worst, said)


@lru_cache(maxsize=1 << 14)
def _cell(key: str, health: Health, said: str) -> Markup:
    return row("i", key, class_=health, title=said)


def host_key(host: HostRow) -> str:
    return f"h{host.first_rank // max(1, len(host.ranks))}"


def _health(shown: View) -> Iterator[tuple[str, Markup]]:
    hosts = format.count(len(shown.hosts), "host")
    counts = Counter(health for host in shown.hosts for health in host.ranks)
    yield "all", row("span", "all", f"{format.count(counts.total(), 'rank')} on {hosts}")
    for health, count in sorted(counts.items()):
        words = f"{count:,} {format.health_text(health)}"
        yield health, row("span", health, element("i", class_=health), words, class_="legend")
    if shown.spares:
        spares = format.count(len(shown.spares), "spare")
        yield "spares", row("span", "spares", spares, title=", ".join(shown.spares))


def _incident_line(one: Incident, job: ReadJob, *, alone: bool) -> Markup:
    standing = job.snapshot.standing
    cost = "; ".join(filter(None, (recovery_text(one, standing.state), lost_work(one))))
    drill = f", drill {one.drill}" if one.drill else ""
    number = element("a", f"#{one.id}", href=job_path(job.path, alone=alone, incident=one.id))
    contents: dict[str, Markup | str] = {
        "number": number,
        "when": format.date_time(one.at, None),
        "what": f"{one.kind}{drill}",
        "cause": format.shorten(one.cause, 240),
        "culprit": format.shorten(format.culprit_text(one.culprit).removeprefix("culprit "), 240),
        "did": format.shorten(action_taken(one, ""), 240),
        "cost": cost,
    }
    hot = is_open(one, standing.state)
    cells = [element("td", contents[name], class_=f"c-{name}") for name in INCIDENT_COLUMNS]
    return row("tr", f"i{one.id}", cells, class_="hot" if hot else None)


def event_rows(
    entries: Sequence[Entry], *, newest_first: bool = True
) -> Iterator[tuple[str, Markup]]:
    ordered = sort_by_time(entries[-MOST_EVENTS:] if newest_first else entries)
    for entry in reversed(ordered) if newest_first else ordered:
        when = format.date_time(event_time(entry.event), None)
        line = event_line(entry, None).removeprefix(when).strip()
        key = f"e{entry.seq}"
        decided = "decided" if entry.actions else None
        time = element("time", when)
        yield key, row("li", key, time, " ", element("span", line), class_=decided)


def _older(snapshot: Snapshot, found: Found) -> Iterator[tuple[str, Markup]]:
    if not found.complete:
        typed = element("code", snapshot.commands.of("events"))
        yield "older", row("p", "older", "Older events: ", typed, class_="soft")


def charts_json(shown: View, saves: Sequence[int]) -> bytes:
    """Numbers, and a unit that ndctl chose. Empty if there are no numbers yet."""
    losses, speeds, unit = shown.series("loss"), shown.series("tokens_per_second"), "tokens/s"
    if not speeds:  # a program of the user that does not count tokens
        unit = "steps/s"
        speeds = tuple((step, 1 / step_s) for step, step_s in shown.series("step_s") if step_s)
    if not losses and not speeds:
        return b""
    return json.dumps(
        {
            "loss": list(zip(*losses, strict=True)),
            "speed": list(zip(*speeds, strict=True)),
            "unit": unit,
            "saves": saves[-MOST_MARKS:],
            "restarts": shown.resumed_steps[-MOST_MARKS:],
        },
        separators=(",", ":"),
    ).encode()

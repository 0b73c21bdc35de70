"""The page of all jobs: trouble first, in the columns of `ndctl list`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.dashboard import format
from orchestrator.dashboard.fleet.row import JobRow, in_order, is_old, is_trouble, row_of
from orchestrator.dashboard.fleet.summary import summary_of
from orchestrator.dashboard.fleet.table import COLUMNS
from orchestrator.plan.page.markup import Markup, element
from orchestrator.web.fleet import FleetState
from orchestrator.web.pages.address import digest_of, job_path
from orchestrator.web.pages.page import Page, Rows, block, row

MOST_JOBS = 1000
"""Rows of the page. `ndctl list` prints all."""
MOST_TEXT = 255
"""Characters of a cell; a folder's name has no more."""
HIDDEN = ("GROUP", "RUN DIR", "SCHEDULER")
"""Columns that are shown when the pointer is on the row; the group also behind the name."""
TEXTS = ("NAME", "USER", "STATE", "BACKEND", "NOTE")
"""Columns that are aligned at the left."""
SHOWN = [column for column in COLUMNS if column.title not in HIDDEN]


def rows_of(state: FleetState) -> list[JobRow]:
    """Each job once, in the order of `ndctl list`."""
    rows = {one.run_dir: one for one in state.others.rows}
    rows |= {
        str(job.path): row_of(job.path, job.owner, summary_of(job.snapshot, job.time))
        for job in state.jobs
    }
    for path, why in state.unreadable.items():
        rows[str(path)] = JobRow(name=path.name, run_dir=str(path), problem=why)
    return in_order(rows.values(), state.at)


def fleet_page(state: FleetState, *, everything: bool) -> Page:
    """`everything`: also jobs that ended long ago, or are gone."""
    rows = rows_of(state)
    shown = rows if everything else [one for one in rows if _is_news(one, state)]
    named = Counter(one.name for one in rows)
    blocks: dict[str, Rows] = {
        "counts": dict(_counts(shown, state.at)),
        "notes": dict(_notes(state, rows, shown)),
        "jobs": {
            digest_of(one.run_dir): _line(one, state.at, alone=named[one.name] == 1)
            for one in shown[:MOST_JOBS]
        },
    }
    trouble = sum(is_trouble(one, state.at) for one in shown)
    title = f"{format.count(len(shown), 'job')}{f', {trouble} in trouble' if trouble else ''}"
    return Page(title=title, blocks=blocks, layout=_layout)


def _is_news(one: JobRow, state: FleetState) -> bool:
    if Path(one.run_dir) in state.unreadable:
        return True
    return not one.gone and not is_old(one, state.at)


def _layout(blocks: Mapping[str, Rows]) -> Markup:
    heads = [
        element("th", _head(column.title), scope="col", class_=_class(column.title))
        for column in SHOWN
    ]
    table = element(
        "table",
        element("thead", element("tr", heads)),
        block("tbody", "jobs", blocks["jobs"]),
        class_="jobs",
    )
    return element(
        "main",
        element(
            "div",
            block("div", "counts", blocks["counts"], class_="counts"),
            element(
                "input",
                type="search",
                id="filter",
                placeholder="filter",
                aria_label="show only jobs with this text",
                autocomplete="off",
            ),
            class_="bar",
        ),
        element("div", table, class_="scroll"),
        block("div", "notes", blocks["notes"], class_="notes"),
    )


def _head(title: str) -> str:
    return title.lower()


def _class(title: str) -> str:
    kind = title.lower().replace(" ", "-")
    return f"c-{kind}" if title in TEXTS else f"c-{kind} n"


def _counts(shown: Sequence[JobRow], now: float) -> Iterator[tuple[str, Markup]]:
    trouble = sum(is_trouble(one, now) for one in shown)
    if trouble:
        words = "needs attention" if trouble == 1 else "need attention"
        yield "trouble", row("b", "trouble", f"{trouble:,} {words}", class_="bad")
    for state, count in Counter(one.state for one in shown).items():
        yield state, row("span", state, f"{count:,} {state.lower()}", class_="soft")


def _notes(
    state: FleetState, rows: Sequence[JobRow], shown: Sequence[JobRow]
) -> Iterator[tuple[str, Markup]]:
    if state.others.problem:
        said = f"The list may be incomplete: {state.others.problem}"
        yield "problem", row("p", "problem", said, class_="warn")
    if state.behind:
        said = f"The storage is slow: {format.count(state.behind, 'job')} shown as of a moment ago."
        yield "behind", row("p", "behind", said, class_="warn")
    if len(shown) > MOST_JOBS:
        more = f"{len(shown) - MOST_JOBS:,} more jobs: ndctl list"
        yield "more", row("p", "more", more, class_="soft")
    if hidden := len(rows) - len(shown):
        link = element("a", f"{hidden:,} that ended long ago or are gone", href="/?all=1")
        yield "hidden", row("p", "hidden", "Not shown: ", link, class_="soft")
    if not rows and not state.others.problem:
        said = "No jobs yet. `ndctl submit` registers each job, and it appears here."
        yield "none", row("p", "none", said)


def _line(one: JobRow, now: float, *, alone: bool) -> Markup:
    told = None if one.job is None else one.job.scheduler
    hover = " · ".join(filter(None, [one.run_dir, one.group, told or ""]))
    cells = [
        element("td", _cell(column.title, column.cell(one, now), one, alone), class_=at)
        for column, at in _CLASSES
    ]
    key = digest_of(one.run_dir)
    return row("tr", key, cells, title=hover, class_="hot" if is_trouble(one, now) else None)


_CLASSES = [(column, _class(column.title)) for column in SHOWN]


def _cell(title: str, text: str, one: JobRow, alone: bool) -> str | Markup:
    # The page of the job has all of it.
    text = format.shorten(text, MOST_TEXT)
    if title == "NAME":
        link = element("a", text, href=job_path(one.run_dir, alone=alone))
        return Markup(link + element("span", f" {one.group}", class_="soft")) if one.group else link
    if title == "STATE":
        return element("span", text, class_=f"state s-{one.state.lower()}")
    unknown = text == format.UNKNOWN or (title in ("AGE", "SIZE") and not one.submitted_at)
    return "" if unknown else text

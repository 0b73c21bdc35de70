"""All jobs, as `ndctl list`, and below the table everything about the selected one."""

from collections import Counter
from collections.abc import Iterator

from rich.text import Text

from orchestrator.dashboard import format
from orchestrator.dashboard.console import text_of
from orchestrator.dashboard.fleet.row import ROW_STATES, JobRow, is_trouble
from orchestrator.dashboard.fleet.summary import eta_s
from orchestrator.dashboard.fleet.table import table
from orchestrator.dashboard.interactive.content import FleetContent
from orchestrator.dashboard.interactive.page import Page
from orchestrator.dashboard.screen.rows import Frame, Row
from orchestrator.dashboard.theme import BOLD, DIM


def fleet_page(page: Page, content: FleetContent) -> Frame:
    rows = [row for row in content.rows if page.matches(_searched(row))]
    head = _head(page, rows)
    if content.hidden:
        head += page.wrapped(f"{content.hidden:,} old or gone: `ndctl list --all`", DIM)
    head += [line for text in content.warnings for line in page.wrapped(text, "yellow")[:2]]
    if not rows:
        none = "no job has that text" if content.rows else "no jobs"
        return page.of_rows([*head, Text(), Text(f" {none}")], [], [])
    titles, *lines = [text_of(line, " ") for line in table(rows, page.now, page.width - 1)]
    shown = [Row(text, row.run_dir) for text, row in zip(lines, rows, strict=True)]
    chosen = next((row for row in rows if row.run_dir == page.place.selected), rows[0])
    return page.of_rows([*head, titles], shown, list(_about(page, chosen)))


def _head(page: Page, rows: list[JobRow]) -> list[Text]:
    """The counts have a line of their own if there is no room beside the time."""
    counts, searched = _counts(rows), (_filter(page), "bold yellow")
    whole = page.head(("ndctl", BOLD), f"  {counts}", searched)
    if whole.plain.rstrip().endswith(format.date_time(page.now, page.zone)):
        return [whole]
    return [page.head(("ndctl", BOLD), searched), *page.wrapped(counts)]


def _searched(row: JobRow) -> str:
    return f"{row.name} {row.user} {row.state} {row.backend} {row.note} {row.run_dir}"


def _filter(page: Page) -> str:
    return f"   /{format.one_line(page.place.needle)}" if page.place.needle else ""


def _counts(rows: list[JobRow]) -> str:
    """`5 jobs: 1 RECOVERING, 4 RUNNING`."""
    counts = Counter[str](row.state for row in rows)
    named = [f"{counts[state]:,} {state}" for state in ROW_STATES if counts[state]]
    return f"{format.count(len(rows), 'job')}{': ' if named else ''}{', '.join(named)}"


def _about(page: Page, row: JobRow) -> Iterator[Text]:
    """What the table had no room for."""
    style = "bold yellow" if is_trouble(row, page.now) else BOLD
    yield Text.assemble("─ ", (format.one_line(row.name), style), "  ", (row.state, DIM))
    if row.note:
        yield from page.wrapped(format.one_line(row.note))
    yield from page.wrapped(" · ".join(_facts(row, page)), DIM)
    yield from page.wrapped(format.one_line(row.run_dir), DIM)


def _facts(row: JobRow, page: Page) -> Iterator[str]:
    yield f"{row.backend} of {format.one_line(row.user)}"
    yield f"{format.count(row.hosts, 'host')}, {format.count(row.gpus, 'device')}"
    yield f"submitted {format.date_time(row.submitted_at, page.zone)}"
    job = row.job
    if job is None:
        return
    yield f"step {format.of_steps(job.step, job.steps)}"
    if job.loss is not None:
        yield f"loss {format.loss(job.loss)}"
    if job.tokens_per_second is not None:
        yield format.rate(job.tokens_per_second)
    if (left := eta_s(job, page.now)) is not None:
        yield f"about {format.duration(left)} left"
    if job.effective_ratio is not None:
        yield f"effective {job.effective_ratio:.1%}"
    yield f"attempt {job.attempt}, {format.count(job.restarts, 'restart')}"
    if job.incidents:
        last = job.incidents[-1]
        ago = format.duration(page.now - last.at)
        yield f"last incident: {last.kind} on {format.one_line(last.host)}, {ago} ago"

"""The incidents of a job in full, all its curves, and the question before it is cancelled."""

from rich.text import Text

from orchestrator.dashboard import format
from orchestrator.dashboard.console import text_of
from orchestrator.dashboard.describe import incident_rows
from orchestrator.dashboard.interactive.content import JobContent
from orchestrator.dashboard.interactive.page import Page
from orchestrator.dashboard.interactive.places import CONFIRMS
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.screen.curves import CURVES, Curve, curve, points_of
from orchestrator.dashboard.screen.rows import Frame
from orchestrator.dashboard.terminal.report import report_lines
from orchestrator.dashboard.theme import BOLD, DIM, fit

LEAST_CURVE = 7
"""Lines of one curve with its title and axis."""
COLUMN = 58
"""Cells that a column of curves has at least."""


def incident_page(page: Page, content: JobContent) -> Frame:
    view, known = content.view, content.view.incidents
    if not known:
        none = "no incident so far"
        if view.state == "RECOVERING":
            none = "evidence of the first incident is being collected"
        return page.of_lines(page.job_head(view, "incidents"), [Text(), Text(f" {none}")])
    number = min(page.place.number, len(known) - 1)
    place = f"incident {len(known) - number} of {len(known)}"
    ways = f"   {'p: the one before' if number < len(known) - 1 else ''}"
    ways += "   n: the next" if number else ""
    rows = incident_rows(known[-1 - number], content.snapshot, page.zone)
    lines = [text_of(line) for line in report_lines("\n".join(rows), page.width)]
    return page.of_lines(page.job_head(view, f"{place}{ways}"), lines)


def metrics_page(page: Page, content: JobContent) -> Frame:
    """As many curves as fit, each with room to read; the others by scrolling."""
    view = content.view
    there = [one for one in CURVES if points_of(view, one)]
    head = page.job_head(view, "metrics; figures of one rank are those of rank 0")
    if not there:
        return page.of_lines(head, [Text(), Text(" no step yet", style=DIM)])
    columns = max(1, min(3, page.width // COLUMN, len(there)))
    rows = -(-len(there) // columns)
    height = max(LEAST_CURVE, page.room // rows)
    lines: list[Text] = []
    for row in range(rows):
        lines += _side_by_side(
            view, there[row * columns : (row + 1) * columns], page, columns, height
        )
    return page.of_lines(head, lines)


def _side_by_side(
    view: View, curves: list[Curve], page: Page, columns: int, height: int
) -> list[Text]:
    width = (page.width - 2 * (columns - 1)) // columns
    drawn = [
        [row.text for row in curve(view, one, width, min_lines=height, priority=0).draw(height)]
        for one in curves
    ]
    lines = []
    for number in range(height):
        cells = [fit(one[number] if number < len(one) else Text(), width) for one in drawn]
        lines.append(Text("  ").join(cells))
    return lines


def cancel_page(page: Page, content: JobContent) -> Frame:
    view = content.view
    saved = view.checkpoint
    behind = max(0, view.step - saved.step)
    kept = f"its newest checkpoint is {saved.name}" if saved.step else "it has no checkpoint yet"
    lines = [
        page.job_head(view, "cancel?"),
        Text(),
        Text.assemble(" Cancel ", (format.one_line(view.name), BOLD), "?"),
        Text(),
        *page.wrapped(
            "Its ranks write a checkpoint if they can, and exit. ndctl does the same as"
            f" `{view.commands.of('cancel')}`."
        ),
        *page.wrapped(
            f"It is at step {view.step:,}; {kept}, {format.count(behind, 'step')} behind."
        ),
        Text(),
        Text.assemble((f" {CONFIRMS}", BOLD), " cancels it; any other key goes back"),
    ]
    frame = page.of_lines(lines[0], lines[1:])
    return Frame(lines=frame.lines, keys=(CONFIRMS,))

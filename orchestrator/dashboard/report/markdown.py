"""The report as Markdown that is readable by itself, also where it is not rendered."""

import re
from collections.abc import Iterator, Sequence

from orchestrator.contract.visible import visible
from orchestrator.dashboard import format
from orchestrator.dashboard.report.costs import NOT_MEASURED, elsewhere, estimated_s
from orchestrator.dashboard.report.story import IncidentStory, Report, cost_words, money, summary
from orchestrator.dashboard.screen.chart import Marks, graph, legend
from orchestrator.dashboard.screen.curves import points_of, telling

WIDTH, HEIGHT = 76, 9
"""Of a curve, in characters."""
MOST_CURVES = 3
SPECIAL = re.compile(r"([\\`*_\[\]<>|#!~$&])")


def markdown_report(report: Report) -> str:
    made = f"Made by `ndctl report` on {format.date_time(report.made_at, report.zone)}."
    lines = [
        f"# Report of {_text(report.view.name)}",
        "",
        made,
        "",
        _text(summary(report)),
        "",
        *_table(["job", ""], report.facts),
        *(line for story in report.stories for line in _story(report, story)),
        *_curves(report),
        "",
        "## Timeline of the job",
        "",
        *_fenced(report.timeline),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _story(report: Report, story: IncidentStory) -> Iterator[str]:
    yield from ("", f"## {_text(story.headline)}", "", _text(story.sentence), "")
    yield from ("Evidence and decision:", "", *_fenced(story.rows), "")
    yield from ("Timeline:", "", *_fenced(story.timeline), "")
    yield from _table(["what it cost", ""], cost_words(story.cost, report.price))
    yield ""
    found = list(elsewhere(story.incident))
    if not found:
        hang = story.incident.kind == "hang"
        yield _text(NOT_MEASURED) if hang else "Nothing comparable was measured elsewhere."
        return
    rows = []
    for one in found:
        seconds = estimated_s(story.cost, one)
        hours = seconds * story.cost.gpus / 3600
        paid = "" if report.price is None else f", {money(hours, report.price)}"
        rows.append(
            (
                f"{one.way} ({one.other_s:g} s to the first new step, ndctl {one.ndctl_s:g} s)",
                f"about {format.duration(seconds)}, {hours:,.3g} GPU-hours{paid};"
                f" {one.source}; {one.remark}",
            )
        )
    yield from _table(["elsewhere", "this incident, plus the measured difference"], rows)


def _curves(report: Report) -> Iterator[str]:
    view = report.view
    marks = Marks(saved=view.saved_steps, resumed=view.resumed_steps)
    for one in telling(view)[:MOST_CURVES]:
        points = points_of(view, one)
        values = [value for _, value in points]
        ends = one.text(max(values)), one.text(min(values))
        drawn = graph(points, ends, marks, WIDTH, HEIGHT)
        signs = legend(points, marks)
        yield from ("", f"## {one.name}{f' ({signs})' if signs else ''}", "")
        yield from _fenced([line.plain.rstrip() for line in drawn])


def _table(head: Sequence[str], rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    for label, text in rows:
        yield f"| {_text(label)} | {_text(text)} |"


def _text(said: str) -> str:
    """Text that Markdown shows as it is: nothing in it becomes markup."""
    return SPECIAL.sub(r"\\\1", format.one_line(said))


def _fenced(lines: Sequence[str]) -> Iterator[str]:
    shown = [visible(line, keep="").rstrip() for line in lines] or ["nothing is recorded"]
    ticks = max((len(run) for line in shown for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    yield f"{fence}text"
    yield from shown
    yield fence

"""The report as one HTML file: no script, no network, light and dark, and fit for paper."""

from collections.abc import Iterator, Sequence

from orchestrator.dashboard import format
from orchestrator.dashboard.report.costs import NOT_MEASURED, elsewhere, estimated_s
from orchestrator.dashboard.report.curve_chart import curve_chart
from orchestrator.dashboard.report.story import IncidentStory, Report, cost_words, money, summary
from orchestrator.dashboard.screen.chart import Marks
from orchestrator.dashboard.screen.curves import points_of, telling
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.plan.page.markup import Markup, element, grid_table
from orchestrator.plan.page.page import POLICY
from orchestrator.plan.page.style import STYLE, item_rules

OWN_STYLE = """
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 8px 12px;
  font: 12px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
/* The rest of a wrapped line is indented. */
pre .line { display: block; padding-left: 4ch; text-indent: -4ch; }
svg .curve { fill: none; stroke: #4e79a7; stroke-width: 1.6; }
svg .saved { stroke: #59a14f; stroke-width: 1.5; }
.facts td:first-child { color: var(--dim); white-space: nowrap; }
@media print { :root { --ground: #ffffff; --text: #000000; --dim: #444444; --rule: #bbbbbb;
  --card: #ffffff; } body { max-width: none; padding: 0; font-size: 11px; }
  figure, .tiles, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } }
"""


def html_report(report: Report) -> str:
    name = report.view.name
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("title", f"Report of {name}"),
        # Style is no text of HTML: nothing in it comes from a job.
        element("style", Markup("\n".join((STYLE, item_rules(), OWN_STYLE)))),
    )
    made = f"made by ndctl report on {format.date_time(report.made_at, report.zone)}"
    body = element(
        "body",
        element("h1", name),
        element("p", made, class_="dim"),
        element("p", summary(report)),
        _tiles(report),
        *[part for story in report.stories for part in _story(report, story)],
        *_charts(report),
        *_time(report.time),
        element("h2", "The job"),
        element("div", grid_table(["", ""], report.facts, left=2), class_="facts"),
        element("h2", "Timeline of the job"),
        _lines(report.timeline),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _tiles(report: Report) -> Markup:
    tiles: list[tuple[str, str]] = [("state", report.view.state)]
    if report.stories:
        total = report.total
        tiles += [
            ("incidents", f"{len(report.stories):,}"),
            ("time lost", format.duration(total.seconds)),
            ("GPU-hours lost", f"{total.gpu_hours:,.3g}"),
        ]
        if report.price is not None:
            tiles.append(("money lost", f"{total.gpu_hours * report.price.per_gpu_hour:,.2f}"))
    if report.time.ratio is not None and report.time.effective_s:
        tiles.append(("effective time", f"{report.time.ratio:.1%}"))
    shown = [
        element("div", element("span", label, class_="dim"), element("b", value), class_="tile")
        for label, value in tiles
    ]
    return element("div", shown, class_="tiles")


def _story(report: Report, story: IncidentStory) -> Iterator[Markup]:
    yield element("h2", story.headline)
    yield element("p", story.sentence)
    yield element("h3", "Evidence and decision")
    yield _lines(story.rows)
    yield element("h3", "Timeline")
    yield _lines(story.timeline)
    yield element("h3", "What it cost")
    rows = cost_words(story.cost, report.price)
    yield element("div", grid_table(["", ""], rows, left=2), class_="facts")
    yield element("h3", "What it would have cost elsewhere")
    yield from _elsewhere(report, story)


def _elsewhere(report: Report, story: IncidentStory) -> Iterator[Markup]:
    found = list(elsewhere(story.incident))
    if not found:
        hang = story.incident.kind == "hang"
        yield element("p", NOT_MEASURED if hang else "Nothing comparable was measured.")
        return
    rows = []
    for one in found:
        seconds = estimated_s(story.cost, one)
        hours = seconds * story.cost.gpus / 3600
        paid = [] if report.price is None else [money(hours, report.price)]
        there = f"{one.other_s:g} s, ndctl {one.ndctl_s:g} s"
        about = [one.way, there, format.duration(seconds), f"{hours:,.3g}", *paid]
        rows.append([*about, f"{one.source}; {one.remark}"])
    head = ["way", "measured to the first new step", "here about", "GPU-hours"]
    head += [] if report.price is None else ["money"]
    yield grid_table([*head, "source"], rows, left=len(head) + 1)
    yield element(
        "p",
        "An estimate: this incident, plus the difference that was measured with a small model on"
        " CPUs. Ranks that load a large model take longer to start again.",
        class_="dim",
    )


def _charts(report: Report) -> Iterator[Markup]:
    view = report.view
    curves = telling(view)
    if not curves:
        return
    marks = Marks(saved=view.saved_steps, resumed=view.resumed_steps)
    yield element("h2", "Curves")
    said = "A dashed line is the first step after a restart, a green mark below the axis a"
    yield element("p", f"{said} complete checkpoint.", class_="dim")
    charts = [curve_chart(one, points_of(view, one), marks) for one in curves]
    yield element("div", charts, class_="charts")


def _time(time: TimeSpent) -> Iterator[Markup]:
    if not time.elapsed_s:
        return
    parts = [("training that counts", time.effective_s)]
    parts += [(format.lost_to(cause), s) for cause, s in time.lost_s.items() if s >= 0.05]
    said = [f"{name} {format.duration(s)}, {s / time.elapsed_s:.1%}" for name, s in parts]
    yield element("h2", "Where the time of the job went")
    yield element(
        "div",
        [
            element(
                "div",
                class_=f"c{number}",
                style=f"width: {100 * s / time.elapsed_s:.3f}%",
                title=said[number],
            )
            for number, (_, s) in enumerate(parts)
        ],
        class_="bar",
        role="img",
        aria_label="parts of the time",
    )
    yield element(
        "ul",
        [
            element("li", element("span", class_=f"swatch c{number}"), words)
            for number, words in enumerate(said)
        ],
        class_="legend",
    )


def _lines(lines: Sequence[str]) -> Markup:
    shown = [element("span", line or " ", class_="line") for line in lines]
    return element("pre", shown or "nothing is recorded")

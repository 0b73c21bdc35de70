"""The page of a plan: memory over a step, time, ranks, alternatives, and what numbers rest on."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from orchestrator.contract.plan import Plan, StepTime
from orchestrator.plan.decision import Decision
from orchestrator.plan.figures import (
    show_bytes,
    show_duration,
    show_seconds,
    show_traffic,
    three_digits,
)
from orchestrator.plan.memory.over_step import MemoryOverStep
from orchestrator.plan.page.markup import Markup, element, grid_table
from orchestrator.plan.page.memory_chart import legend, memory_chart
from orchestrator.plan.page.rank_map import map_rules, rank_map
from orchestrator.plan.page.style import STYLE, item_rules
from orchestrator.plan.show.bars import kinds_of
from orchestrator.plan.show.decision import basis_of, estimates, headline
from orchestrator.plan.show.explain import (
    CHOICE_HEAD,
    choice_row,
    history_of,
    prices_of,
    software_of,
)

CHARTS = 4
"""Charts of memory; of more kinds of ranks, the fullest are drawn."""
WIDE, NARROW = 900, 460
"""Widths of one chart and of one of several, in units of its text."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""A browser loads and runs nothing, whatever the page contains."""


class HardwareNumber(Struct, frozen=True, kw_only=True):
    name: str
    value: str
    source: str


class Page(Struct, frozen=True, kw_only=True):
    """What is drawn."""

    job: str
    plan: Plan
    decision: Decision | None
    memory: tuple[MemoryOverStep, ...]
    """Of every rank along pp; empty for the user's own program."""
    hardware: tuple[HardwareNumber, ...]


def html_of(page: Page) -> str:
    """The whole page: one file that needs no script, no network and no other file."""
    plan = page.plan
    styles = "\n".join((STYLE, item_rules(), map_rules(plan)))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("title", f"Plan of {page.job}"),
        # Style is no text of HTML: nothing in it is escaped, and nothing in it comes from a spec.
        element("style", Markup(styles)),
    )
    sections = [
        *_section("What the job takes", _decision(page.decision)),
        *_section("Memory of a rank over a step", _memory(page.memory)),
        *_section("Where the time of a step goes", _time(plan.time)),
        *_section("Ranks on hosts and switches", _ranks(plan)),
        *_section("Alternatives", _alternatives(plan)),
        *_section("Notes", _notes(plan)),
        *_section("What each number rests on", _basis(page)),
    ]
    body = element("body", element("h1", page.job), _subtitle(plan), _tiles(page), sections)
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _section(title: str, content: Iterator[Markup]) -> list[Markup]:
    found = [*content]
    return [element("h2", title), *found] if found else []


def _subtitle(plan: Plan) -> Markup:
    hosts = f"{len(plan.hosts):,} host{'s' if len(plan.hosts) > 1 else ''}"
    of = f" of {plan.profile}" if plan.profile else ""
    ranks = f"{plan.world_size:,} rank{'s' if plan.world_size > 1 else ''}"
    said = f"{plan.split}: {ranks} on {hosts} x {plan.ranks_per_host}{of}"
    if plan.software is not None:
        said += f"; speed of {plan.software}, memory of the bundled trainer"
    return element("p", said, class_="dim")


def _tiles(page: Page) -> Markup:
    plan, told = page.plan, page.decision
    tiles: list[tuple[str, str]] = []
    if told is not None:
        finish = told.with_failures_s or told.training_s
        tiles.append(("to finish", show_duration(finish.expected)))
    if plan.time is not None:
        tiles += [
            ("a step", show_seconds(plan.time.step_s)),
            ("tokens/s per device", three_digits(plan.time.tokens_per_second_per_device)),
            ("MFU", f"{plan.time.mfu:.1%}"),
        ]
    if plan.memory is not None:
        limit = plan.memory.device_bytes
        of = f" of {show_bytes(limit)}" if limit else ""
        tiles.append(("memory of the fullest rank", f"{show_bytes(plan.memory.peak_bytes)}{of}"))
    shown = [
        element("div", element("span", label, class_="dim"), element("b", value), class_="tile")
        for label, value in tiles
    ]
    return element("div", shown, class_="tiles")


def _decision(decision: Decision | None) -> Iterator[Markup]:
    if decision is None:
        return
    yield element("p", headline(decision))
    yield grid_table(["", "expected", "9 of 10 runs"], estimates(decision))
    yield element("ul", [element("li", said) for said in basis_of(decision)], class_="dim")


def _memory(memory: Sequence[MemoryOverStep]) -> Iterator[Markup]:
    if not memory:
        return
    labels = kinds_of([one.memory for one in memory])
    by_kind = {id(one.memory): one for one in memory}
    drawn = [(label, by_kind[id(first)]) for label, first in labels.items()]
    fullest = sorted(drawn, key=lambda one: -one[1].memory.peak_bytes)[:CHARTS]
    shown = [one for one in drawn if one in fullest]
    width = WIDE if len(shown) == 1 else NARROW
    yield element(
        "p",
        "One micro batch and the update, at the fullest moment of the schedule. The width of a"
        " phase is not its duration. Point at a moment for its sizes.",
        class_="dim",
    )
    charts = [memory_chart(one, label, width) for label, one in shown]
    yield element("div", charts, class_="charts") if len(charts) > 1 else charts[0]
    yield legend(memory)
    if len(drawn) > len(shown):
        yield element("p", f"{len(drawn) - len(shown)} more kinds of ranks need less.")


def _time(time: StepTime | None) -> Iterator[Markup]:
    if time is None:
        return
    parts = [
        element(
            "div",
            class_=f"c{number}",
            style=f"width: {100 * seconds / time.step_s:.3f}%",
            title=f"{part}: {show_seconds(seconds)}, {seconds / time.step_s:.1%}",
        )
        for number, (part, seconds) in enumerate(time.parts.items())
    ]
    yield element("div", parts, class_="bar", role="img", aria_label="parts of a step")
    yield element(
        "ul",
        [
            element(
                "li",
                element("span", class_=f"swatch c{number}"),
                f"{part} {show_seconds(seconds)}, {seconds / time.step_s:.1%}",
            )
            for number, (part, seconds) in enumerate(time.parts.items())
        ],
        class_="legend",
    )


def _ranks(plan: Plan) -> Iterator[Markup]:
    yield rank_map(plan)
    if not plan.communication:
        return
    head = ["axis", "collective", "of", "crosses", "sent per step", "ideal", "time", "exposed"]
    rows = [
        [
            one.axis,
            one.collective,
            one.what,
            one.level,
            show_traffic(one.bytes_per_step),
            show_seconds(one.ideal_seconds),
            show_seconds(one.seconds),
            show_seconds(one.exposed_seconds) if one.exposed_seconds > 0 else "hidden",
        ]
        for one in plan.communication
    ]
    yield element("h3", "What the slowest rank sends in a step")
    yield grid_table(head, rows, left=4)


def _alternatives(plan: Plan) -> Iterator[Markup]:
    best = plan.choice
    if best is not None and plan.alternatives:
        rows = [choice_row(one, best) for one in (best, *plan.alternatives)]
        yield grid_table(CHOICE_HEAD, rows, left=4)
    if plan.rejected:
        total = sum(one.count for one in plan.rejected)
        body = [
            [f"{one.count:,}", one.family, one.constraint]
            for one in sorted(plan.rejected, key=lambda one: -one.count)
        ]
        yield element(
            "details",
            element("summary", f"{total:,} other meshes, and why not"),
            grid_table(["meshes", "which", "why"], body, left=3),
        )


def _notes(plan: Plan) -> Iterator[Markup]:
    notes = [*prices_of(plan), *plan.notes]
    if notes:
        yield element("ul", [element("li", note) for note in notes])


def _basis(page: Page) -> Iterator[Markup]:
    time, memory = page.plan.time, page.plan.memory
    rows = []
    if time is not None:
        spread = time.tokens_per_second_per_device_range
        ranged = "" if spread is None else " to ".join(map(three_digits, spread))
        rows.append(["tokens/s per device", ranged, time.confidence])
        if page.plan.software is not None:
            rows.append(["", "", software_of(page.plan.software)])
        if time.correction is not None:
            rows.append(["", "", history_of(time.correction)])
    if memory is not None and memory.peak_bytes_range is not None:
        peaks = " to ".join(map(show_bytes, memory.peak_bytes_range))
        rows.append(["peak memory", peaks, memory.basis or ""])
    if rows:
        yield grid_table(["number", "9 of 10 runs", "rests on"], rows, left=3)
    if page.hardware:
        body = [[one.name, one.value, one.source] for one in page.hardware]
        yield element(
            "details",
            element("summary", f"Numbers of {page.plan.profile}, with their sources"),
            grid_table(["number", "value", "source"], body, left=3),
        )

"""Draws a `View` as one frame of exactly `width` x `height` cells; keeps no state."""

import itertools
import textwrap
from collections.abc import Callable, Sequence
from datetime import tzinfo

from msgspec import Struct
from rich.text import Text

from orchestrator.contract.mesh import AXES
from orchestrator.dashboard import format
from orchestrator.dashboard.screen.chart import chart
from orchestrator.dashboard.screen.grid import grid_info, grid_lines, lines_needed
from orchestrator.dashboard.status import checkpoint_text
from orchestrator.dashboard.theme import (
    BAR,
    BOLD,
    DIM,
    GLYPHS,
    STATES,
    badge,
    bar,
    fit,
    join_parts,
    left_and_right,
    title,
)
from orchestrator.dashboard.view import View
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.hosts.straggler_replacement import why_slow
from orchestrator.job.incident import Incident
from orchestrator.job.stage import ENDED

TWO_COLUMNS = (116, 22)
"""Minimum width and height for two columns."""
MAX_CHART_LINES = 10
MIN_BAR = 6
TALL_BODY = 18
"""From this many lines on, the chart keeps more than one line."""


def draw(view: View, width: int, height: int, zone: tzinfo | None = None) -> Text:
    lines = frame(view, width, height, zone)
    text = Text("\n").join(fit(line, width) for line in lines)
    text.no_wrap = True
    text.overflow = "crop"
    return text


def frame(view: View, width: int, height: int, zone: tzinfo | None) -> list[Text]:
    """Exactly `height` lines. If not all fits, the chart shrinks first, then incidents, grid."""
    head = _header(view, width, zone)[: max(1, height - 1)]
    room = height - len(head) - 1
    wide, tall = TWO_COLUMNS
    if width >= wide and height >= tall:
        body = _two_columns(view, width, room, zone)
    else:
        chart_least = 4 if room >= TALL_BODY else 2
        parts = [_ranks(view, width), _losses(view, width, chart_least)]
        body = _stack([*parts, _incidents(view, width, zone), _facts(view, width)], room)
    body = [*body[:room], *[Text()] * (room - len(body))]
    return [*head, *body, _footer(view)][:height]


def _header(view: View, width: int, zone: tzinfo | None) -> list[Text]:
    attempt = f"attempt {view.attempt}" if view.attempt else ""
    restarts = format.count(view.restarts, "restart") if view.restarts else ""
    stage = "" if view.state in ENDED else view.stage
    if view.as_of is not None:
        stage = f"{format.duration(view.now - view.as_of)} ago"
    stage_text = join_parts([stage, attempt, restarts])
    name = Text(view.name, style=BOLD)
    name.truncate(max(8, width // 2 - 4), overflow="ellipsis")
    left = Text.assemble(" ", name, "  ", badge(view.state), ("   " + stage_text, DIM))
    right = Text(f"{format.date_time(view.now, zone)} ", style=DIM)
    return [
        left_and_right(left, right, width),
        _progress(view, width),
        Text(f" {_numbers(view)}"),
        *_reason(view, width),
        *_short(view, zone),
    ]


def _progress(view: View, width: int) -> Text:
    if not view.steps:  # the user's own program, whose number of steps is unknown
        times = f"   elapsed {format.stopwatch(view.elapsed_s)}"
        return Text.assemble((f" step {view.step:,} ", BOLD), times)
    percent = 100 * view.step // view.steps if view.steps else 0
    eta = "" if view.eta_s is None else f"   eta {format.stopwatch(view.eta_s)}"
    times = f"   elapsed {format.stopwatch(view.elapsed_s)}{eta}"
    left, right = f" step {format.of_steps(view.step, view.steps)} ", f" {percent:>3}%{times} "
    if len(left) + len(right) + MIN_BAR > width:
        right = f" {percent:>3}% "
    room = max(0, width - len(left) - len(right))
    return Text.assemble((left, BOLD), bar(view.step, view.steps, room), right)


def _numbers(view: View) -> str:
    parts = [f"loss {format.loss(view.loss)}"] if view.loss is not None else []
    if view.tokens_per_second is not None:
        parts.append(format.rate(view.tokens_per_second))
    if view.step_s is not None:
        parts.append(f"{view.step_s:.2f} s/step")
    parts += format.use(view.peak_memory_bytes, view.gpu_utilization)
    quiet = view.quiet_s
    if view.state == "RUNNING" and quiet is not None and quiet > max(5.0, 3 * (view.step_s or 0)):
        parts.append(f"last step {format.duration(quiet)} ago")
    return join_parts([*parts, view.split, view.backend])


def _reason(view: View, width: int) -> list[Text]:
    """The reason of the job's state if it is not obvious, and the fix."""
    if view.as_of is None and (view.state == "RUNNING" or view.reason in view.stage):
        return []
    style = STATES[view.state][1]
    wrapped = textwrap.wrap(format.one_line(view.reason), max(10, width - 2), max_lines=3)
    lines = [Text(f" {part}", style=style) for part in wrapped]
    typed = textwrap.wrap(view.fix, max(10, width - 6), break_on_hyphens=False)
    marks = [" fix: ", *["      "] * len(typed)]
    return lines + [
        Text.assemble(mark, (part, BOLD)) for mark, part in zip(marks, typed, strict=False)
    ]


def _short(view: View, zone: tzinfo | None) -> list[Text]:
    if view.gives_back_at is None:
        return []
    due = format.date_time(max(view.gives_back_at, view.now), zone)
    return [
        Text.assemble(
            f" if no hosts arrive, ndctl releases all hosts at {due}; to give up: ",
            (view.commands.of("cancel"), BOLD),
        )
    ]


class _Part(Struct, frozen=True, kw_only=True):
    """A section of the body with a flexible height."""

    min_lines: int
    """With less room the section is left out."""
    max_lines: int
    """Lines that the section can fill."""
    priority: int
    """Sections with a lower number get their lines first."""
    draw: Callable[[int], list[Text]]
    """Draws at most the given number of lines."""


def _stack(parts: Sequence[_Part], room: int) -> list[Text]:
    """`parts` below each other: first the minimum of each, then the rest, both by priority."""
    given = dict.fromkeys(range(len(parts)), 0)
    by_priority = sorted(given, key=lambda index: parts[index].priority)
    for index in by_priority:
        if parts[index].min_lines <= room:
            given[index] = parts[index].min_lines
            room -= parts[index].min_lines
    for index in by_priority:
        if given[index]:
            more = min(room, parts[index].max_lines - given[index])
            given[index] += more
            room -= more
    return [line for index, part in enumerate(parts) for line in part.draw(given[index])]


def _two_columns(view: View, width: int, room: int, zone: tzinfo | None) -> list[Text]:
    left_width = (width - 2) * 11 // 20
    right_width = width - 2 - left_width
    left = _stack([_ranks(view, left_width), _losses(view, left_width, 6)], room)
    right = _stack([_facts(view, right_width), _incidents(view, right_width, zone)], room)
    pairs = itertools.zip_longest(left, right, fillvalue=Text())
    return [
        Text.assemble(fit(one, left_width), "  ", fit(other, right_width)) for one, other in pairs
    ]


def _ranks(view: View, width: int) -> _Part:
    def lines(height: int) -> list[Text]:
        if height < 1:
            return []
        grid = grid_lines(view, width - 2, height - 1)
        return [title("ranks", grid_info(view), width), *(Text("  ").append(g) for g in grid)]

    max_lines = 1 + lines_needed(view, width - 2)
    return _Part(min_lines=min(3, max_lines), max_lines=max_lines, priority=1, draw=lines)


def _losses(view: View, width: int, min_lines: int) -> _Part:
    def lines(height: int) -> list[Text]:
        if height < 2:
            return []
        return [title("loss", _loss_info(view), width), *_chart(view, width, height - 1)]

    if not view.losses:
        return _Part(min_lines=0, max_lines=0, priority=9, draw=lines)
    return _Part(min_lines=min_lines, max_lines=1 + MAX_CHART_LINES, priority=3, draw=lines)


def _loss_info(view: View) -> Text:
    (first, began), (last, ended) = view.losses[0], view.losses[-1]
    text = f"{format.loss(began)} at step {first:,}, {format.loss(ended)} at step {last:,}"
    return Text(text, style=DIM)


def _chart(view: View, width: int, height: int) -> list[Text]:
    """The chart, with the highest and lowest value at its left."""
    values = [value for _, value in view.losses]
    marks = [format.loss(max(values)), *[""] * (height - 2), format.loss(min(values))]
    size = max(len(mark) for mark in marks)
    rows = chart(view.losses, max(1, width - size - 4), height)
    if height == 1:
        return [Text.assemble("  ", (rows[0], BAR))]
    return [
        Text.assemble(f"  {mark:>{size}} ", (row, BAR))
        for mark, row in zip(marks, rows, strict=True)
    ]


def _incidents(view: View, width: int, zone: tzinfo | None) -> _Part:
    blocks = [_incident(view, incident, width, zone) for incident in reversed(view.incidents)]

    def lines(height: int) -> list[Text]:
        if height < 1:
            return []
        info = Text(_incidents_info(view), style=DIM)
        return [title("incidents", info, width), *_newest(blocks, height - 1, view)]

    max_lines = 1 + sum(map(len, blocks))
    return _Part(min_lines=min(4, max_lines), max_lines=max_lines, priority=2, draw=lines)


def _incidents_info(view: View) -> str:
    known = str(len(view.incidents)) if view.incidents else "none"
    settled = not view.incidents or view.incidents[-1].recovered_after_s is not None
    if view.state == "RECOVERING" and settled:
        return "collecting evidence of a new one" + (f", {known} before" if view.incidents else "")
    return known


def _newest(blocks: list[list[Text]], height: int, view: View) -> list[Text]:
    """Whole incidents, newest first, and a line that counts the incidents left out."""
    if sum(map(len, blocks)) <= height:
        return [line for block in blocks for line in block]
    lines: list[Text] = []
    for index, block in enumerate(blocks):
        left = len(blocks) - index
        if height - len(lines) < len(block) + (left > 1):
            short = block[: max(0, height - len(lines) - (left > 1))] if index == 0 else []
            older = left - 1 if short else left
            note = [Text(f"  … {older:,} earlier: {view.commands.of('describe')}", style=DIM)]
            return [*lines, *short, *(note if older else [])][:height]
        lines += block
    return lines


def _incident(view: View, incident: Incident, width: int, zone: tzinfo | None) -> list[Text]:
    recovered = incident.recovered_after_s is not None
    sign, style = GLYPHS["done" if recovered else "dead"]
    head = Text.assemble(
        (f"  {sign} ", style),
        f"{format.short_date_time(incident.at, zone)} ",
        (incident.kind, BOLD if recovered else style),
        (" drill" if incident.drill else "", DIM),
    )
    who = "no culprit" if incident.culprit == NOBODY else str(incident.culprit)
    place = _place(view, incident)
    heads = [head]
    if head.cell_len + 2 + len(who) <= width:
        head.append(f"  {who}")
    else:
        heads.append(Text(f"    {who}"))
    if heads[-1].cell_len + len(place) <= width:
        heads[-1].append(place, style=DIM)
    text = [
        format.one_line(incident.cause),
        format.one_line(incident.action),
        _cost(incident, view),
    ]
    return [*heads, *(line for text in text for line in _wrapped(text, width))]


def _place(view: View, incident: Incident) -> str:
    """Mesh coordinates of the culprit."""
    rank = incident.culprit.rank
    # A rank of an earlier, larger plan has no place in the present mesh.
    if rank is None or view.is_own or rank >= view.mesh.world_size:
        return ""
    degrees = dict(zip(AXES, view.mesh.degrees, strict=True))
    coords = format.coordinates(view.mesh.coords(rank), degrees)
    return f" ({coords})" if coords else ""


def _cost(incident: Incident, view: View) -> str:
    found = format.detection_delay(incident.detected_after_s)
    if incident.recovered_after_s is not None:
        return f"{found}, recovered after {format.duration(incident.recovered_after_s)}"
    if view.state in ENDED:
        return f"{found}, not recovered"
    return f"{found}, recovering for {format.duration(view.now - incident.at)}"


def _wrapped(text: str, width: int) -> list[Text]:
    lines = textwrap.wrap(text, max(10, width - 4), max_lines=4, placeholder=" …")
    return [Text(f"    {line}") for line in lines]


def _facts(view: View, width: int) -> _Part:
    facts = [title("checkpoint", Text(checkpoint_text(view.checkpoint, view), DIM), width)]
    for found in view.stragglers[:2]:
        text = f"{found.host}: {why_slow(found)}"
        facts.append(title("straggler", Text(text, BOLD), width))
    if view.drills:
        text = ", ".join(f"{text} {'fired' if fired else 'armed'}" for text, fired in view.drills)
        facts.append(title("drills", Text(text, DIM), width))
    if view.spares:
        names = ", ".join(view.spares)
        text = f"{format.count(len(view.spares), 'host')}: {names}"
        facts.append(title("spares", Text(text, DIM), width))
    return _Part(min_lines=1, max_lines=len(facts), priority=0, draw=lambda height: facts[:height])


def _footer(view: View) -> Text:
    keys = Text.assemble((" q", BOLD), (" quit", DIM))
    return keys.append(f"   more: {view.commands.of('describe')}", style=DIM)

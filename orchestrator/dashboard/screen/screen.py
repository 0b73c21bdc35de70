"""Draws a `View` as one frame of exactly `width` x `height` cells; keeps no state.

A narrow screen is one column: ranks, charts, incidents, facts. A wide one has trouble at the left
(ranks and incidents) and curves at the right. If not all fits, charts shrink first.
"""

import itertools
import math
from collections.abc import Sequence
from datetime import tzinfo

from rich.text import Text

from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.screen.curves import CURVES, Curve, curve, telling
from orchestrator.dashboard.screen.grid import counts_lines, grid, hosts_in_trouble, lines_needed
from orchestrator.dashboard.screen.header import header
from orchestrator.dashboard.screen.incidents import incidents
from orchestrator.dashboard.screen.rows import Frame, Row, Section, framed, plain, stack
from orchestrator.dashboard.status import checkpoint_text
from orchestrator.dashboard.theme import BOLD, DIM, fit, title
from orchestrator.job.hosts.straggler_replacement import why_slow

TWO_COLUMNS = (116, 22)
"""Minimum width and height for two columns."""
TALL_BODY = 18
"""From this many lines on, the loss keeps more than one line."""
CURVE_LINES = 8
"""Lines of a curve in two columns, with its title and axis."""
MOST_CURVE_LINES = 16
LEFT_FOR_OTHERS = 8
"""Lines of one column that hosts without trouble leave to the rest."""
MOST_STRAGGLERS = 4


def draw(view: View, width: int, height: int, zone: tzinfo | None = None) -> Text:
    """The screen without keys."""
    keys = Text.assemble((" q", BOLD), (" quit", DIM))
    footer = keys.append(f"   more: {view.commands.of('describe')}", style=DIM)
    text = Text("\n").join(frame(view, width, height, zone, footer).lines)
    text.no_wrap = True
    text.overflow = "crop"
    return text


def frame(
    view: View,
    width: int,
    height: int,
    zone: tzinfo | None,
    footer: Text,
    selected: str | None = None,
) -> Frame:
    """Exactly `height` lines, the last of which is `footer`."""
    head = header(view, width, zone)[: max(1, height - 1)]
    room = height - len(head) - 1
    wide, tall = TWO_COLUMNS
    if width >= wide and height >= tall:
        body = _two_columns(view, width, room, zone)
    else:
        body = _one_column(view, width, room, zone)
    body = [*body[: max(0, room)], *[Row(Text())] * (room - len(body))]
    return framed([*plain(head), *body, Row(footer)][:height], width, height, selected)


def _one_column(view: View, width: int, room: int, zone: tzinfo | None) -> list[Row]:
    loss = curve(view, CURVES[0], width, min_lines=4 if room >= TALL_BODY else 2, priority=3)
    speed = curve(view, CURVES[1], width, min_lines=4, priority=4)
    sections = [
        _ranks(view, width, room - LEFT_FOR_OTHERS),
        loss,
        *([speed] if room >= TALL_BODY else []),
    ]
    return stack([*sections, incidents(view, width, zone), _facts(view, width)], room)


def _two_columns(view: View, width: int, room: int, zone: tzinfo | None) -> list[Row]:
    """Curves fill what the facts leave at the right, and what trouble leaves at the left."""
    left_width = (width - 2) * 11 // 20
    right_width = width - 2 - left_width
    facts = _facts(view, right_width, whole=True)
    trouble = [_ranks(view, left_width, room - 4), incidents(view, left_width, zone)]
    there = telling(view)
    right_room = room - facts.max_lines
    left_room = room - sum(section.max_lines for section in trouble)
    split = _curves_at_right(len(there), left_room, right_room)
    at_right, at_left = there[:split], there[split:][: max(0, left_room // CURVE_LINES)]
    left = stack([*trouble, *_evenly(view, at_left, left_width, left_room)], room)
    right = stack([facts, *_evenly(view, at_right, right_width, right_room)], room)
    pairs = itertools.zip_longest(left, right, fillvalue=Row(Text()))
    return [_beside(one, other, left_width, right_width) for one, other in pairs]


def _curves_at_right(number: int, left_room: int, right_room: int) -> int:
    """How many of `number` curves: as many as their share of the room, so that no column is empty
    beside a full one."""
    fits_left, fits_right = max(0, left_room // CURVE_LINES), max(1, right_room // CURVE_LINES)
    shown = min(number, fits_left + fits_right)
    share = math.ceil(shown * right_room / max(1, max(0, left_room) + right_room))
    return min(fits_right, max(shown - fits_left, share))


def _beside(left: Row, right: Row, left_width: int, right_width: int) -> Row:
    text = Text.assemble(fit(left.text, left_width), "  ", fit(right.text, right_width))
    return Row(text, left.opens, left_width)


def _evenly(view: View, curves: Sequence[Curve], width: int, room: int) -> list[Section]:
    """Curves that share `room`; the first get the lines that remain."""
    each, more = divmod(max(0, room), len(curves)) if curves else (0, 0)
    heights = [min(MOST_CURVE_LINES, each + (index < more)) for index in range(len(curves))]
    return [
        curve(view, one, width, min_lines=height, priority=3 + index)
        for index, (one, height) in enumerate(zip(curves, heights, strict=True))
    ]


def _ranks(view: View, width: int, most: int) -> Section:
    head = plain(counts_lines(view, width, titled=True))

    def lines(height: int) -> list[Row]:
        rows = grid(view, width - 2, height - len(head))
        return [*head, *(Row(Text("  ").append_text(row.text), row.opens) for row in rows)][:height]

    max_lines = len(head) + lines_needed(view, width - 2, most)
    # Hosts in trouble come before curves, but leave half of the room to the rest.
    trouble = min(len(hosts_in_trouble(view)) + 1, most // 2)
    least = min(len(head) + max(2, trouble), max_lines)
    return Section(min_lines=least, max_lines=max_lines, priority=1, draw=lines)


def _facts(view: View, width: int, *, whole: bool = False) -> Section:
    """Facts, each cut to one line if there is no room for more; with `whole` all are in full."""
    facts = _named_facts(view)
    in_full = [_fact(name, text, style, width) for name, text, style in facts]
    max_lines = sum(map(len, in_full))

    def lines(height: int) -> list[Row]:
        left, shown = height - len(facts), list[Text]()
        for full, (name, text, style) in zip(in_full[:height], facts, strict=False):
            more = len(full) - 1
            fits = more <= left
            left -= more if fits else 0
            shown += full if fits else [title(name, Text(text, style), width)]
        return plain(shown)

    least = max_lines if whole else len(facts)
    return Section(min_lines=least, max_lines=max_lines, priority=0, draw=lines)


def _named_facts(view: View) -> Sequence[tuple[str, str, str]]:
    """Name, text and style of each."""
    facts = [("checkpoint", checkpoint_text(view.checkpoint, view), DIM)]
    facts += [
        ("straggler", format.one_line(f"{found.host}: {why_slow(found)}"), BOLD)
        for found in view.stragglers[:MOST_STRAGGLERS]
    ]
    if len(view.stragglers) > MOST_STRAGGLERS:
        more = len(view.stragglers) - MOST_STRAGGLERS
        facts.append(("stragglers", f"{more:,} more: {view.commands.of('status', '--json')}", DIM))
    if view.time is not None and (lost := format.lost_time(view.time.lost_s.items())):
        facts.append(("lost time", lost, DIM))
    if view.drills:
        text = ", ".join(f"{text} {'fired' if fired else 'armed'}" for text, fired in view.drills)
        facts.append(("drills", text, DIM))
    if view.spares:
        text = f"{format.count(len(view.spares), 'host')}: {', '.join(view.spares)}"
        facts.append(("spares", format.one_line(text), DIM))
    return facts


def _fact(name: str, text: str, style: str, width: int) -> list[Text]:
    if len(name) + format.cells(text) + 8 <= width:
        return [title(name, Text(text, style), width)]
    wrapped = format.wrapped(text, max(10, width - 4), max_lines=5, placeholder=" …")
    return [title(name, Text(), width), *(Text(f"    {line}", style) for line in wrapped)]

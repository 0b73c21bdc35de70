"""Rows of a screen, and sections of rows that share a height."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct, field
from rich.text import Text

from orchestrator.dashboard.theme import fit


class Row(Struct, frozen=True):
    text: Text
    opens: str = ""
    """Key of what a person can open here; empty: nothing."""
    cells: int | None = None
    """Cells that stand out if it is selected; None: all."""


class Frame(Struct, frozen=True, kw_only=True):
    """One screen, ready to show."""

    lines: Sequence[Text]
    """Each of exactly the width of the screen."""
    keys: Sequence[str] = ()
    """Everything that can be selected, in order, also what is not in sight."""
    at: Mapping[int, str] = field(default_factory=dict)
    """Line -> what is selected by a click on it."""
    top: int = 0
    """First line of a long text that is in sight."""
    last_top: int = 0
    """`top` when its end is in sight."""


class Section(Struct, frozen=True, kw_only=True):
    """A part of the screen with a flexible height."""

    min_lines: int
    """With less room the section is left out."""
    max_lines: int
    """Lines that the section can fill."""
    priority: int
    """Sections with a lower number get their lines first."""
    draw: Callable[[int], list[Row]]
    """Draws at most the given number of lines."""


def stack(sections: Sequence[Section], room: int) -> list[Row]:
    """Sections below each other: first the minimum of each, then the rest, both by priority."""
    given = dict.fromkeys(range(len(sections)), 0)
    by_priority = sorted(given, key=lambda index: sections[index].priority)
    for index in by_priority:
        if 0 < sections[index].min_lines <= room:
            given[index] = sections[index].min_lines
            room -= sections[index].min_lines
    for index in by_priority:
        if given[index]:
            more = min(room, sections[index].max_lines - given[index])
            given[index] += more
            room -= more
    return [
        row
        for index, section in enumerate(sections)
        if given[index]
        for row in section.draw(given[index])
    ]


def plain(lines: Iterable[Text]) -> list[Row]:
    return [Row(line) for line in lines]


def framed(rows: Sequence[Row], width: int, height: int, selected: str | None = None) -> Frame:
    """Rows cut and filled to the screen; the selected row stands out. None: nothing is selected,
    as on a screen without keys."""
    keys = [row.opens for row in rows if row.opens]
    if selected is not None and selected not in keys:
        selected = keys[0] if keys else None
    lines = []
    for row in [*rows, *[Row(Text())] * (height - len(rows))][:height]:
        line = fit(row.text, width)
        if row.opens and row.opens == selected:
            line.stylize("reverse", 0, row.cells)
        lines.append(line)
    at = {number: row.opens for number, row in enumerate(rows[:height]) if row.opens}
    return Frame(lines=lines, keys=keys, at=at)

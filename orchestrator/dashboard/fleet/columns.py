"""Tables fitted to the width of a terminal.

The first column and a note, if there is one, are what a person acts on, so they stay at any width.
Other columns are dropped in a given order until the note has room. A pipe has no width: every
column is printed in full.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from orchestrator.dashboard import format

T = TypeVar("T")
GAP = "  "
LEAST_NOTE = 24
"""Columns are dropped until the note has so many cells."""
LEAST_NAME = 20
"""Cells that a name may take on any terminal; a quarter of a wide one."""
NOTE = "NOTE"

Look = Mapping[str, object]
"""Arguments of `click.style`."""


class Piece(Struct, frozen=True):
    """Text with one look."""

    text: str
    look: Look = {}


Line = tuple[Piece, ...]


class Column(Struct, Generic[T], frozen=True):
    title: str
    cell: Callable[[T, float], str]
    right: bool = False
    """Numbers are aligned at the right."""
    repeats: bool = True
    """Shown even if no row has a value."""


class Table(Struct, Generic[T], frozen=True, kw_only=True):
    columns: Sequence[Column[T]]
    dropped_first: Sequence[str]
    look: Callable[[str, T, float], Look]
    """Of the cell below a title."""

    def lines(self, rows: Sequence[T], now: float, width: int | None) -> list[Line]:
        """The head and a line per row. `width` in cells; None: unlimited, as for a pipe."""
        cells = [[format.one_line(one.cell(row, now)) for one in self.columns] for row in rows]
        chosen = self._chosen(cells, width)
        widths = {at: self._width_of(at, cells, width) for at in chosen}
        heads = [(self.columns[at].title, {"dim": True}) for at in chosen]
        lines = [self._line(heads, widths, width)]
        for row, texts in zip(rows, cells, strict=True):
            looks = [(texts[at], self.look(self.columns[at].title, row, now)) for at in chosen]
            lines.append(self._line(looks, widths, width))
        return lines

    def _chosen(self, cells: Sequence[Sequence[str]], width: int | None) -> list[int]:
        """The places of the columns to show."""
        shown = [
            at
            for at, column in enumerate(self.columns)
            if column.repeats or any(row[at] not in ("", format.UNKNOWN) for row in cells)
        ]
        if width is None:
            return shown
        for title in self.dropped_first:
            if self._needed(shown, cells, width) <= width:
                break
            shown = [at for at in shown if self.columns[at].title != title]
        return shown

    def _needed(self, shown: Sequence[int], cells: Sequence[Sequence[str]], width: int) -> int:
        widths = {at: self._width_of(at, cells, width) for at in shown}
        if self.columns[shown[-1]].title == NOTE:
            widths[shown[-1]] = min(LEAST_NOTE, widths[shown[-1]])
        return sum(widths.values()) + len(GAP) * (len(widths) - 1)

    def _width_of(self, at: int, cells: Sequence[Sequence[str]], width: int | None) -> int:
        widest = max([len(self.columns[at].title), *(format.cells(row[at]) for row in cells)])
        return widest if at or width is None else min(widest, max(LEAST_NAME, width // 4))

    def _line(
        self, looks: Iterable[tuple[str, Look]], widths: Mapping[int, int], width: int | None
    ) -> Line:
        pieces: list[Piece] = []
        used, last = 0, max(widths)
        for (text, look), (at, most) in zip(looks, widths.items(), strict=True):
            room = most if width is None else max(0, min(most, width - used))
            text = format.clip(text, room)
            fill = " " * (room - format.cells(text))
            if self.columns[at].right:
                pieces += [Piece(fill), Piece(text, look)]
            else:
                pieces += [Piece(text, look), Piece("" if at == last else fill)]
            pieces.append(Piece("" if at == last else GAP))
            used += room + len(GAP)
        return tuple(piece for piece in pieces if piece.text)

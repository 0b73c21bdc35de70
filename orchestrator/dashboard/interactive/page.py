"""What every page gets to draw itself, and the parts that pages share."""

from collections.abc import Sequence
from datetime import tzinfo

from msgspec import Struct
from rich.text import Text

from orchestrator.dashboard import format
from orchestrator.dashboard.interactive.places import Place
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.screen.rows import Frame, Row, framed, plain
from orchestrator.dashboard.theme import BOLD, DIM, badge, left_and_right


class Page(Struct, frozen=True, kw_only=True):
    place: Place
    width: int
    height: int
    now: float
    zone: tzinfo | None
    footer: Text

    @property
    def room(self) -> int:
        """Lines between a head of one line and the footer."""
        return max(0, self.height - 2)

    def head(self, *left: str | tuple[str, str]) -> Text:
        right = Text(f"{format.date_time(self.now, self.zone)} ", style=DIM)
        return left_and_right(Text.assemble(" ", *left), right, self.width)

    def job_head(self, view: View, words: str) -> Text:
        name = format.clip(format.one_line(view.name), max(8, self.width // 3))
        state = badge(view.state)
        return self.head((name, BOLD), "  ", (state.plain, str(state.style)), f"   {words}")

    def wrapped(self, text: str, style: str = "") -> list[Text]:
        lines = format.wrapped(text, max(10, self.width - 2), break_on_hyphens=False)
        return [Text(f" {line}", style=style) for line in lines]

    def matches(self, text: str) -> bool:
        return self.place.needle.lower() in text.lower()

    def of_rows(self, head: Sequence[Text], rows: Sequence[Row], below: Sequence[Text]) -> Frame:
        """A list of which the part around the selected row is in sight, and below it a text if
        there is room."""
        room = max(1, self.height - len(head) - 1)
        keys = [row.opens for row in rows]
        chosen = keys.index(self.place.selected) if self.place.selected in keys else 0
        first = min(max(0, chosen - room // 2), max(0, len(rows) - room))
        shown = list(rows[first : first + room])
        rest = room - len(shown)
        tail = plain([Text(), *below][:rest] if below and rest > 1 else [])
        fill = [Row(Text())] * (rest - len(tail))
        every = [*plain(head), *shown, *tail, *fill]
        frame = framed(
            [*every[: self.height - 1], Row(self.footer)],
            self.width,
            self.height,
            self.place.selected,
        )
        return Frame(lines=frame.lines, keys=keys, at=frame.at)

    def of_lines(self, head: Text, lines: Sequence[Text]) -> Frame:
        """A text that can be scrolled; it begins at its beginning."""
        last_top = max(0, len(lines) - self.room)
        top = min(last_top, self.place.top or 0)
        shown = [head, *lines[top : top + self.room]]
        shown += [Text()] * (self.height - 1 - len(shown))
        frame = framed(plain([*shown[: self.height - 1], self.footer]), self.width, self.height)
        return Frame(lines=frame.lines, top=top, last_top=last_top)

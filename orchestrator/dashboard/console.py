"""What rich prints: control characters are visible, and reports are wrapped as by `status`."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from orchestrator.contract.visible import visible
from orchestrator.dashboard.fleet.columns import Line
from orchestrator.dashboard.terminal.report import report_lines


class VisibleConsole(Console):
    """Escapes control characters in all text. Control codes of rich itself pass unchanged."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=visible(piece.text))


def print_report(console: VisibleConsole, text: str) -> None:
    """Print `text`: on a terminal in colours and wrapped between words, else as it is."""
    if not console.is_terminal:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    for line in report_lines(text, console.width):
        console.print(text_of(line), soft_wrap=True)


def text_of(line: Line, margin: str = "") -> Text:
    """A line of a table or a report, with its colours."""
    text = Text(margin)
    for piece in line:
        looks = [str(piece.look["fg"])] if "fg" in piece.look else []
        looks += [key for key in ("bold", "dim") if piece.look.get(key)]
        text.append(visible(piece.text, keep=""), style=" ".join(looks))
    return text

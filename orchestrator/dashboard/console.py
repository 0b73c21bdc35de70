"""The screen on which rich draws."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from orchestrator.contract.visible import visible


class VisibleConsole(Console):
    """Each piece of text that it draws passes `visible`; rich's own control codes do not."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=visible(piece.text))

"""A rich console that makes control characters of job output visible."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from orchestrator.contract.visible import visible


class VisibleConsole(Console):
    """Escapes control characters in all text. Control codes of rich itself pass unchanged."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=visible(piece.text))

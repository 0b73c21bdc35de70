"""The edge of the screen with keys: textual reads keys and the mouse, and shows frames.

Everything that decides is in `places` and `pages`; everything that may block is in `feed`.
"""

import asyncio
import threading
from datetime import tzinfo

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from orchestrator.contract.visible import visible
from orchestrator.dashboard.interactive.content import Services, sources_of
from orchestrator.dashboard.interactive.feed import Feeds
from orchestrator.dashboard.interactive.pages import Sight, draw_page
from orchestrator.dashboard.interactive.places import Place, click, press
from orchestrator.dashboard.screen.rows import Frame
from orchestrator.errors import NdctlError
from orchestrator.seams import Clock

REDRAW_S = 1.0
"""Times on the screen advance so often, also without news."""
MESSAGE_S = 15.0
WHEEL = 3
"""Lines per notch."""


class Canvas(Widget):
    """Shows the lines of a frame."""

    can_focus = True

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Strip] = []

    def show(self, frame: Frame) -> None:
        lines = [self._strip(line) for line in frame.lines]
        if lines != self.lines:
            self.lines = lines
            self.refresh()

    def _strip(self, line: Text) -> Strip:
        # The last gate before the terminal: no control character of a job passes it.
        segments = [
            segment._replace(text=visible(segment.text, keep=""))
            for segment in line.render(self.app.console)
        ]
        return Strip(segments).adjust_cell_length(self.size.width)

    def render_line(self, y: int) -> Strip:
        return self.lines[y] if y < len(self.lines) else Strip.blank(self.size.width)


class Fresh(Message):
    """A source has been read."""


class Said(Message):
    """An action has ended."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words


class DashboardApp(App[None]):
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Canvas { width: 100%; height: 100%; background: ansi_default; color: ansi_default; }
    """
    ENABLE_COMMAND_PALETTE = False
    TITLE = "ndctl"

    def __init__(
        self, services: Services, first: Place, clock: Clock, zone: tzinfo | None = None
    ) -> None:
        super().__init__(ansi_color=True)
        self.services, self.clock, self.zone = services, clock, zone
        self.places: tuple[Place, ...] = (first,)
        self.feeds = Feeds(services, lambda: self.post_message(Fresh()), clock)
        self.message, self.said_at = "", 0.0
        self.frame = Frame(lines=())
        self.canvas = Canvas()

    def compose(self) -> ComposeResult:
        yield self.canvas

    def on_mount(self) -> None:
        self.canvas.focus()
        self.set_interval(REDRAW_S, self.redraw)
        self._go(self.places)

    def redraw(self) -> None:
        width, height = self.canvas.size
        if not self.places or width < 1 or height < 1:
            return
        if self.message and self.clock.monotonic() - self.said_at > MESSAGE_S:
            self.message = ""
        sight = Sight(
            place=self.places[-1],
            is_first=len(self.places) == 1,
            readings=self.feeds.readings(),
            message=self.message,
            now=self.clock.now(),
            zone=self.zone,
        )
        self.frame = draw_page(sight, width, height)
        self.canvas.show(self.frame)

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    def on_fresh(self, message: Fresh) -> None:
        self.redraw()

    def on_said(self, message: Said) -> None:
        self.message, self.said_at = message.words, self.clock.monotonic()
        self.redraw()

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        if event.key in ("ctrl+c", "ctrl+q"):
            self.exit()
            return
        character = event.character if event.is_printable else None
        pressed = press(self.places, event.key, character, self.frame, self.canvas.size.height)
        self.message = ""
        if pressed.cancels:
            self._cancel(pressed.cancels)
        self._go(pressed.stack)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._go(click(self.places, event.y, self.frame))

    def on_mouse_scroll_down(self) -> None:
        self._scroll("down")

    def on_mouse_scroll_up(self) -> None:
        self._scroll("up")

    def _scroll(self, key: str) -> None:
        for _ in range(1 if self.frame.keys else WHEEL):
            self._go(press(self.places, key, None, self.frame, self.canvas.size.height).stack)

    def _go(self, places: tuple[Place, ...]) -> None:
        self.places = places
        if not places:
            self.exit()
            return
        self.feeds.show(sources_of(places[-1]))
        self.redraw()

    def _cancel(self, job: str) -> None:
        """On a thread, because a leader may be far away or gone."""
        self.message, self.said_at = "asking the job to end …", self.clock.monotonic()
        threading.Thread(target=self._ask_to_cancel, args=(job,), daemon=True).start()

    def _ask_to_cancel(self, job: str) -> None:
        try:
            words = self.services.cancel(job)
        except (OSError, NdctlError) as exc:
            words = str(exc)
        self.post_message(Said(words))


def run_app(services: Services, first: Place, clock: Clock) -> None:
    """Show pages until the person leaves."""
    app = DashboardApp(services, first, clock)
    asyncio.run(app.run_async())

"""Long texts: logs, events, stacks, help. A text that grows is followed while its end is shown."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.text import Text

from orchestrator.contract.visible import visible
from orchestrator.dashboard import format
from orchestrator.dashboard.follow.newest_lines import NewestLines
from orchestrator.dashboard.interactive.keys import KEYS
from orchestrator.dashboard.interactive.page import Page
from orchestrator.dashboard.job_view.health import WORST_FIRST
from orchestrator.dashboard.screen.chart import RESUMED, SAVED
from orchestrator.dashboard.screen.rows import Frame, framed, plain
from orchestrator.dashboard.theme import BOLD, DIM, GLYPHS

MOST_PARTS = 8
"""NewestLines of the screen that one line of a text takes at most."""


def text_page(page: Page, title: str, content: NewestLines) -> Frame:
    """`place.top` counts lines of the text, which may take several lines of the screen."""
    found = [line for line in content.lines if page.matches(line)] if page.place.needle else None
    lines = content.lines if found is None else found
    room, width = page.room, page.width - 1
    follows = page.place.kind in ("logs", "events")
    last_top = _top_of_end(lines, width, room)
    top = min(last_top, last_top if page.place.top is None and follows else page.place.top or 0)
    shown: list[Text] = []
    for line in lines[top:]:
        shown += [Text(f" {part}") for part in _parts(line, width)]
        if len(shown) >= room:
            break
    if not shown and page.place.kind in ("logs", "events"):
        none = "no line with that text" if content.lines else "no line yet"
        shown = [Text(), Text(f" {none}", style=DIM)]
    head = page.head((title, BOLD), (_info(page, content, len(lines), top, last_top), DIM))
    rows = [head, *shown[:room]]
    rows += [Text()] * (page.height - 1 - len(rows))
    frame = framed(plain([*rows[: page.height - 1], page.footer]), page.width, page.height)
    return Frame(lines=frame.lines, top=top, last_top=last_top)


def _info(page: Page, content: NewestLines, shown: int, top: int, last_top: int) -> str:
    words = f"   {format.count(shown, 'line')}"
    if page.place.needle:
        words += f" with /{format.one_line(page.place.needle)} of {len(content.lines):,}"
    if content.dropped:
        words += f", {content.dropped:,} earlier ones are not kept here"
    if page.place.kind in ("logs", "events"):
        words += "   following" if top >= last_top else "   G: the end"
    return words


def _top_of_end(lines: Sequence[str], width: int, room: int) -> int:
    """The first line in sight when the end is."""
    left = room
    for number in range(len(lines) - 1, -1, -1):
        left -= len(_parts(lines[number], width))
        if left < 0:
            return number + 1
    return 0


def _parts(line: str, width: int) -> list[str]:
    """`line` without control characters, broken into lines of the screen."""
    text = visible(line, keep="").rstrip()
    parts = list(_by_cells(text, width)) if not text.isascii() else list(_by_words(text, width))
    if len(parts) > MOST_PARTS:
        parts = [*parts[: MOST_PARTS - 1], f"… {len(text):,} characters in all"]
    return parts


def _by_words(text: str, width: int) -> Iterator[str]:
    """Breaks at a blank near the end of a line, if there is one."""
    while len(text) > width > 0:
        blank = text.rfind(" ", width * 3 // 4, width)
        end = width if blank < 0 else blank + 1
        yield text[:end]
        text = text[end:]
    yield text


def _by_cells(text: str, width: int) -> Iterator[str]:
    """The same for text with characters that take no cell, or two."""
    part, used = "", 0
    for char in text:
        size = format.cells(char)
        if used + size > width and part:
            end = part.rfind(" ", len(part) * 3 // 4) + 1 or len(part)
            yield part[:end]
            part = part[end:]
            used = format.cells(part)
        part, used = part + char, used + size
    yield part


def tail(lines: Sequence[str], width: int, height: int) -> list[Text]:
    """The end of a text, at most `height` lines of the screen."""
    shown: list[Text] = []
    for line in reversed(lines):
        if len(shown) >= height:
            break
        shown = [Text(f" {part}") for part in _parts(line, width)] + shown
    return shown[-height:] if height else []


def help_lines(width: int) -> list[str]:
    lines = ["", "Keys"]
    for key in KEYS:
        first = f"  {key.sign:<5} "
        room = max(10, width - 2)
        lines += wrap(key.words, room, initial_indent=first, subsequent_indent=" " * len(first))
    lines += ["", "Ranks"]
    lines += [f"  {GLYPHS[health][0]}     {_MEANING[health]}" for health in WORST_FIRST]
    lines += [
        "",
        "Axis of a curve",
        f"  {SAVED[0]}     a checkpoint is complete",
        f"  {RESUMED[0]}     the first step after a restart",
    ]
    return lines


_MEANING = {
    "culprit": "culprit: the present incident is due to this rank",
    "dead": "dead: it exited, or the agent of its host is lost",
    "silent": "no heartbeat",
    "straggler": "straggler: all ranks wait for it",
    "slow": "late heartbeat",
    "starting": "starting: no step yet",
    "stopped": "stopped",
    "done": "done",
    "ok": "ok",
}

"""Colours, glyphs and line shapes of all screens.

Each colour comes with a glyph, so that a screen can also be read without colour.
"""

from collections.abc import Mapping, Sequence

from rich.text import Text

from orchestrator.dashboard.job_view.health import Health
from orchestrator.job.stage import State

GLYPHS: Mapping[Health, tuple[str, str]] = {
    "ok": ("●", "green"),
    "straggler": ("▲", "bold yellow"),
    "culprit": ("◆", "bold red"),
    "slow": ("◐", "yellow"),
    "silent": ("○", "magenta"),
    "dead": ("✗", "bold red"),
    "starting": ("◌", "blue"),
    "done": ("✓", "green"),
    "stopped": ("–", "dim"),  # noqa: RUF001 - as wide as the other glyphs
}
STATES: Mapping[State, tuple[str, str]] = {
    "SUBMITTED": ("◌", "blue"),
    "PENDING": ("◌", "blue"),
    "STARTING": ("◌", "blue"),
    "RUNNING": ("●", "green"),
    "RECOVERING": ("◐", "yellow"),
    "SUSPENDED": ("◌", "yellow"),
    "SUCCEEDED": ("✓", "green"),
    "FAILED": ("✗", "bold red"),
    "CANCELLED": ("–", "yellow"),  # noqa: RUF001 - as wide as the other glyphs
}
BAR = "cyan"
DIM = "dim"
BOLD = "bold"


def glyph(health: Health) -> Text:
    return Text(*GLYPHS[health])


def badge(state: State) -> Text:
    sign, style = STATES[state]
    return Text(f"{sign} {state}", style=style)


def fit(line: Text, width: int) -> Text:
    """`line` cut and filled to exactly `width` cells."""
    line = line.copy()
    line.truncate(max(0, width), overflow="ellipsis", pad=True)
    return line


def title(name: str, info: Text, width: int) -> Text:
    line = Text.assemble(("─ ", DIM), (name, BOLD), "  " if info else "", info, " ")
    line.truncate(max(0, width - 2), overflow="ellipsis")
    return line.append("─" * max(0, width - line.cell_len), style=DIM)


def left_and_right(left: Text, right: Text, width: int) -> Text:
    """`left` and `right` aligned to the two sides; `right` is dropped if there is no room."""
    gap = width - left.cell_len - right.cell_len
    if gap < 2:
        return fit(left, width)
    return Text.assemble(left, " " * gap, right)


def bar(done: int, whole: int, width: int) -> Text:
    """A progress bar with a resolution of half a cell."""
    share = min(1.0, done / whole) if whole else 0.0
    halves = int(share * width * 2)
    full, half = divmod(halves, 2)
    line = Text("━" * full + "╸" * half, style=BAR)
    return line.append("─" * (width - full - half), style=DIM)


def join_parts(parts: Sequence[str]) -> str:
    return " · ".join(part for part in parts if part)

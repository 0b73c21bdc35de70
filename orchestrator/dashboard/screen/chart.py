"""Draws a series of numbers with block characters, above an axis of steps."""

from collections.abc import Iterable, Sequence

from msgspec import Struct
from rich.text import Text

from orchestrator.dashboard.theme import BAR, DIM

BLOCKS = " ▁▂▃▄▅▆▇█"
SAVED = ("◇", "green")
RESUMED = ("↻", "bold yellow")


class Marks(Struct, frozen=True, kw_only=True):
    """Steps that the axis shows."""

    saved: Sequence[int] = ()
    """Complete checkpoints."""
    resumed: Sequence[int] = ()
    """First steps after a restart."""


def chart(points: Sequence[tuple[int, float]], width: int, height: int) -> list[str]:
    """`height` lines of `width` characters, the highest value on top.

    The lowest value has a visible block too, so that an empty column means no data.

    Args:
        points: (step, value) in ascending steps.
    """
    if not points or width < 1 or height < 1:
        return [" " * width] * height
    values = resample(points, width)
    low, high = min(values), max(values)
    full = height * 8
    span = high - low
    eighths = [1 + round((v - low) / span * (full - 1)) if span else full // 2 for v in values]
    return [
        "".join(BLOCKS[min(8, max(0, filled - row * 8))] for filled in eighths)
        for row in reversed(range(height))
    ]


def resample(points: Sequence[tuple[int, float]], width: int) -> list[float]:
    """One value per column: the mean of its points, or the previous value if it has none."""
    first, last = points[0][0], points[-1][0]
    values: list[float] = []
    place = 0
    for column in range(width):
        end = first + (last - first) * (column + 1) / width
        crowd = []
        while place < len(points) and (points[place][0] <= end or column == width - 1):
            crowd.append(points[place][1])
            place += 1
        if crowd:
            values.append(sum(crowd) / len(crowd))
        else:
            values.append(values[-1] if values else points[0][1])
    return values


def axis(first: int, last: int, marks: Marks, width: int) -> Text:
    """The axis below a chart of the same width, with checkpoints and restarts."""
    signs: list[tuple[str, str]] = [("─", DIM)] * width
    for steps, sign in ((marks.saved, SAVED), (marks.resumed, RESUMED)):
        for column in _columns(steps, first, last, width):
            signs[column] = sign
    return Text.assemble(*signs)


def _columns(steps: Iterable[int], first: int, last: int, width: int) -> Iterable[int]:
    """The columns of `resample` that have these steps."""
    for step in steps:
        if first <= step <= last and width > 0:
            share = (step - first) * width / (last - first) if last > first else 0
            yield min(width - 1, max(0, -int(-share // 1) - 1))


def graph(
    points: Sequence[tuple[int, float]],
    ends: tuple[str, str],
    marks: Marks,
    width: int,
    height: int,
) -> list[Text]:
    """A chart of `height` lines with its highest and lowest value at the left, and from three lines
    on with an axis.

    Args:
        ends: the highest and the lowest value, as text.
    """
    size = max(map(len, ends))
    room = max(1, width - size - 4)
    if height < 2:
        return [Text.assemble("  ", (row, BAR)) for row in chart(points, room, height)]
    bars = height - (1 if height >= 3 else 0) - (1 if height >= 6 else 0)
    labels = [ends[0], *[""] * (bars - 2), ends[1]] if bars > 1 else [ends[0]]
    rows = chart(points, room, bars)
    lines = [
        Text.assemble(f"  {label:>{size}} ", (row, BAR))
        for label, row in zip(labels, rows, strict=True)
    ]
    first, last = points[0][0], points[-1][0]
    if height >= 3:
        lines.append(Text(" " * (size + 3)).append_text(axis(first, last, marks, room)))
    if height >= 6:
        left, right = f"step {first:,}", f"{last:,}"
        gap = " " * max(1, room - len(left) - len(right))
        lines.append(Text(" " * (size + 3) + left + gap + right, style=DIM))
    return lines


def legend(points: Sequence[tuple[int, float]], marks: Marks) -> str:
    """What the signs on the axis mean; empty if it has none."""
    first, last = points[0][0], points[-1][0]
    named = ((marks.saved, f"{SAVED[0]} checkpoint"), (marks.resumed, f"{RESUMED[0]} restart"))
    return "   ".join(words for steps, words in named if any(first <= s <= last for s in steps))

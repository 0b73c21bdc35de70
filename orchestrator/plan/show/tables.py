"""Rows of text in columns, and numbers as a person reads them."""

from collections.abc import Sequence

WIDTH = 100
"""Columns of a terminal that a plan is drawn for."""
GAP = "  "


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  "
) -> list[str]:
    """Lines; the first `left` columns begin at their left end, the others end at their right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        (
            indent
            + GAP.join(
                text.ljust(width) if number < left else text.rjust(width)
                for number, (text, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in (head, *rows)
    ]


def wrapped(text: str, first: str, indent: str) -> list[str]:
    """`text` behind `first`, in lines that fit; those that follow begin with `indent`."""
    lines, line = [], first
    for word in text.split():
        if len(line) + len(word) + 1 > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = indent
        line += word + " "
    return [*lines, line.rstrip()]


def show_seconds(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} us"


def show_traffic(count: float) -> str:
    """Bytes on a wire, which are counted in powers of ten as its rate is."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{three_digits(count / factor)} {unit}"
    return f"{count:.0f} B"


def three_digits(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"

"""Rows of text in columns."""

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

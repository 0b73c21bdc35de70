"""Rows of text in columns."""

from collections.abc import Sequence

WIDTH = 100
"""Width of the terminal, in columns."""
GAP = "  "
LABEL = 14
"""Columns before the text of a section: the longest label and a gap."""


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  "
) -> list[str]:
    """Lines; the first `left` columns are aligned left, the others right."""
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
    """`text` behind `first`, broken into lines that fit; each further line begins with `indent`."""
    lines, line = [], first
    for word in text.split():
        if len(line) + len(word) + 1 > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = indent
        line += word + " "
    return [*lines, line.rstrip()]


def labelled(label: str, text: str) -> list[str]:
    return wrapped(text, f"{label:<{LABEL}}", " " * LABEL)

"""The text of a table without its colours."""

from collections.abc import Iterable

from orchestrator.dashboard.fleet.columns import Line


def text_of(lines: Iterable[Line]) -> str:
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)

"""Pieces of documents, which every source format yields.

They are pieces and not whole documents, because a text file may be larger than memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.errors import TrainingError


class Piece(NamedTuple):
    text: bytes
    """UTF-8, except for text files with tokenizer `bytes`."""
    learned: bool
    last: bool
    """The document ends with this piece."""
    size: float
    """Bytes of the source that this piece used, to measure progress."""


@dataclass(frozen=True, slots=True)
class Columns:
    text: str
    prompt: str | None = None
    """Column that precedes the text; its tokens are not learned."""

    @property
    def names(self) -> list[str]:
        return [self.text] if self.prompt is None else [self.prompt, self.text]


def row_pieces(
    row: Mapping[str, Any], columns: Columns, where: str, size: float
) -> Iterator[Piece]:
    """The document of a table row; nothing for a row without text."""
    texts = [text_of(row, name, where) for name in columns.names]
    if not any(texts):
        return
    if columns.prompt is not None:
        yield Piece(texts[0], learned=False, last=False, size=0)
    yield Piece(texts[-1], learned=True, last=True, size=size)


def text_of(row: Mapping[str, Any], column: str, where: str) -> bytes:
    if column not in row:
        raise no_column(column, list(row), where)
    text = row[column]
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise TrainingError(
            f"{where}: column {column!r} holds {text!r:.60} ({kind}), not a string",
            fix="remove such rows, or name a text column",
        )
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise TrainingError(
            f"{where}: column {column!r} holds half a surrogate pair ({exc.reason})",
            fix="write the file again with valid Unicode",
        ) from exc


def no_column(column: str, existing: list[str], where: str) -> TrainingError:
    return TrainingError(
        f"{where}: no column {column!r}; columns: {', '.join(map(repr, existing)) or 'none'}",
        fix="set data.column (and data.prompt_column) to existing columns",
    )


@contextmanager
def reading(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns an OSError, or one of `errors`, into a TrainingError that names the file."""
    try:
        yield
    except (OSError, *errors) as exc:  # type: ignore[misc]  # (mypy takes no unpacked classes)
        raise TrainingError(
            f"failed to read {path}: {exc}", fix="check that the file is complete and readable"
        ) from exc

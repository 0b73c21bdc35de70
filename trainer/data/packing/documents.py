"""What a source yields, whatever its format: pieces of documents, learned or not.

Pieces rather than documents, so that a file larger than memory can be read as well.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.errors import TrainingError


class Piece(NamedTuple):
    text: bytes
    """UTF-8, except of text files that are read as bytes."""
    learned: bool
    last: bool
    """The document ends with this piece."""
    size: float
    """Bytes of the source that it took up."""


@dataclass(frozen=True, slots=True)
class Columns:
    text: str
    prompt: str | None = None
    """Comes before the text and is not learned."""

    @property
    def names(self) -> list[str]:
        return [self.text] if self.prompt is None else [self.prompt, self.text]


def row_pieces(
    row: Mapping[str, Any], columns: Columns, where: str, size: float
) -> Iterator[Piece]:
    """The document in a row of a table; none where there is no text in it."""
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
            fix="take such rows out, or name a column of text",
        )
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise TrainingError(
            f"{where}: column {column!r} holds half a character ({exc.reason})",
            fix="write the file again with valid Unicode",
        ) from exc


def no_column(column: str, there: list[str], where: str) -> TrainingError:
    return TrainingError(
        f"{where}: there is no column {column!r}; there is {', '.join(map(repr, there)) or 'none'}",
        fix="set data.column (and data.prompt_column) to columns that are there",
    )


@contextmanager
def reading(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns an OSError, or one of `errors`, into one that names the file."""
    try:
        yield
    except (OSError, *errors) as exc:  # type: ignore[misc]  # (mypy takes no unpacked classes)
        raise TrainingError(
            f"{path} cannot be read: {exc}", fix="check that the file is whole, and its permissions"
        ) from exc

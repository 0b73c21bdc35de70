"""Packs sources into token files, in batches, so that memory use does not grow with the data."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from orchestrator.contract.files.data_files import Found
from orchestrator.errors import TrainingError
from trainer.data.packing.documents import Columns, Piece
from trainer.data.packing.sources import read_pieces
from trainer.data.packing.tokenizer import Tokenizer, Tokens
from trainer.data.packing.writer import TokenWriter, writing
from trainer.data.tokens import Header, read_header

BATCH_BYTES, BATCH_PIECES = 4 << 20, 4096
"""Limits of one call of the tokenizer."""


@dataclass(frozen=True, slots=True)
class Progress:
    part: float
    """Share of the sources' bytes, 0 to 1."""
    num_tokens: int


OnProgress = Callable[[Progress], None]
"""Called after each batch."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Everything that decides the content of a token file."""

    found: Found
    columns: Columns
    tokenizer: Tokenizer

    @property
    def made_from(self) -> str:
        """A hash that changes whenever packing might give a different file."""
        files = [(file.path, file.size, file.changed_ns) for file in self.found.files]
        columns = self.columns.names if self.found.format in ("jsonl", "parquet", "dataset") else []
        inputs = [self.found.format, files, columns, self.tokenizer.vocabulary.identity]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def packing_of(found: Found, columns: Columns, tokenizer: Tokenizer) -> Packing:
    """Raises TrainingError if a prompt column is set for text files, which have no columns."""
    if columns.prompt is not None and found.format == "text":
        raise TrainingError(
            f"no prompt column {columns.prompt!r} in {found.files[0].path}: text files have no"
            " columns",
            fix="give files with columns (.jsonl, .parquet, a dataset), or no prompt column",
        )
    return Packing(found, columns, tokenizer)


def pack_unless_there(packing: Packing, out: Path, on_progress: OnProgress) -> tuple[Header, bool]:
    """The header of `out`, and whether it was packed now; a file of the same sources is reused."""
    try:
        header = read_header(str(out))
    except TrainingError:  # missing, damaged, or not a token file
        return pack(packing, out, on_progress), True
    if header.made_from == packing.made_from:
        return header, False
    return pack(packing, out, on_progress), True


def pack(packing: Packing, out: Path, on_progress: OnProgress) -> Header:
    """Write all documents to the token file `out`.

    Raises:
        TrainingError: a row is unusable, or writing `out` failed.
    """
    tokenizer = packing.tokenizer
    # Hashed before the files are read, so that the next start notices a change during packing.
    made_from = packing.made_from
    pieces = read_pieces(packing.found, packing.columns, tokenizer.reads_text)
    with writing(out, tokenizer.vocabulary.kind) as writer:
        _pack_pieces(pieces, tokenizer, writer, _byte_counter(on_progress, packing.found.size))
        if not writer.num_documents:
            raise TrainingError(
                f"no text in {packing.found.files[0].path}"
                + (" and the other files" if len(packing.found.files) > 1 else ""),
                fix="give files and columns that contain text",
            )
        return writer.finish(tokenizer.vocabulary, packing.columns.prompt is not None, made_from)


@dataclass(slots=True)
class _Row:
    """Tokens and documents that are not written yet."""

    length: int = 0
    """Tokens so far, those that are written included."""
    learned_from: int | None = None
    """Start of the learned part of the current document; None before its first learned piece."""
    parts: list[Tokens] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def add(self, piece: Piece, tokens: Tokens, end: Tokens) -> None:
        if piece.learned and self.learned_from is None:
            self.learned_from = self.length
        self._append(tokens)
        if piece.last:
            self._append(end)
            self.ends.append(self.length)
            self.starts.append(self.learned_from or 0)
            self.learned_from = None

    def _append(self, tokens: Tokens) -> None:
        self.parts.append(tokens)
        self.length += len(tokens)

    def write_to(self, writer: TokenWriter) -> None:
        ends, starts = (np.array(at, dtype=np.int64) for at in (self.ends, self.starts))
        writer.add(np.concatenate(self.parts), ends, starts)
        for done in (self.parts, self.ends, self.starts):
            done.clear()


def _pack_pieces(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    writer: TokenWriter,
    count: Callable[[float, int], None],
) -> None:
    row = _Row()
    end = np.array([tokenizer.vocabulary.end], dtype=tokenizer.vocabulary.kind)
    for batch in _batches(pieces):
        encoded = tokenizer.encode([piece.text for piece in batch])
        for piece, tokens in zip(batch, encoded, strict=True):
            row.add(piece, tokens, end)
        row.write_to(writer)
        count(sum(piece.size for piece in batch), row.length)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _byte_counter(on_progress: OnProgress, total: int) -> Callable[[float, int], None]:
    """Adds up the bytes of batches and reports their share of `total`."""
    done = 0.0

    def count(size: float, num_tokens: int) -> None:
        nonlocal done
        done += size
        on_progress(Progress(min(1.0, done / total), num_tokens))

    return count

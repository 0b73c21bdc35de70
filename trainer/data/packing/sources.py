"""Reads documents from files, in the order of the files."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.contract.files.data_files import File, Found
from orchestrator.contract.read_json import read_json
from orchestrator.errors import TrainingError
from trainer.data.packing.documents import Columns, Piece, reading, row_pieces
from trainer.data.packing.tables import read_dataset, read_parquet

PIECE_BYTES = 1 << 20
"""A text file is tokenised in pieces of at most this size, which end at a line end if possible."""


def read_pieces(found: Found, columns: Columns, utf8: bool) -> Iterator[Piece]:
    """The documents of all files. With `utf8`, text files must be valid UTF-8.

    Raises:
        TrainingError: a row is unusable. The message names file, line and column.
    """
    for file in found.files:
        match found.format:
            case "text":
                yield from read_text(file, utf8)
            case "jsonl":
                yield from read_jsonl(file, columns)
            case "parquet":
                yield from read_parquet(file, columns)
            case "dataset":
                yield from read_dataset(file, columns)
            case "tokens":
                raise AssertionError("token files are never packed")


def read_text(file: File, utf8: bool) -> Iterator[Piece]:
    """The file as one document."""
    line, rest = 1, b""
    with reading(file.path), Path(file.path).open("rb") as stream:
        while True:
            data = rest + stream.read(PIECE_BYTES - len(rest))
            last = len(data) < PIECE_BYTES
            cut = len(data) if last else end_of_piece(data)
            piece, rest = data[:cut], data[cut:]
            if utf8:
                check_utf8(piece, file.path, line)
                line += piece.count(b"\n")
            yield Piece(piece, learned=True, last=last, size=len(piece))
            if last:
                return


def end_of_piece(data: bytes) -> int:
    """Where to cut a text that continues: after the last line end, else before the last space,
    else before the last UTF-8 character, so that no character is split."""
    if cut := data.rfind(b"\n") + 1:
        return cut
    if (cut := data.rfind(b" ")) > 0:
        return cut
    starts = (n for n in range(len(data) - 1, max(0, len(data) - 5), -1) if data[n] & 0xC0 != 0x80)
    return next(starts, len(data))


def check_utf8(text: bytes, path: str, line: int) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as exc:
        line += text.count(b"\n", 0, exc.start)
        raise TrainingError(
            f"{path}:{line}: byte {text[exc.start]:#04x} is not UTF-8 ({exc.reason})",
            fix="convert the file to UTF-8, or exclude it from the glob",
        ) from exc


def read_jsonl(file: File, columns: Columns) -> Iterator[Piece]:
    """One document per line; empty lines are ignored."""
    with reading(file.path), Path(file.path).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                row = parse_line(line, file.path, number)
                yield from row_pieces(row, columns, f"{file.path}:{number}", len(line))


def parse_line(line: bytes, path: str, number: int) -> dict[str, Any]:
    check_utf8(line, path, number)
    try:
        row = read_json(line)
    except ValueError as exc:
        if "int_max_str_digits" in str(exc):  # Python's advice, which a user of ndctl cannot follow
            raise TrainingError(
                f"{path}:{number}: a number has more than {sys.get_int_max_str_digits():,} digits",
                fix="write it as a text in quotes, or leave it out",
            ) from exc
        raise TrainingError(
            f"{path}:{number}: not JSON: {exc}", fix="each line must be one JSON object"
        ) from exc
    if not isinstance(row, dict):
        raise TrainingError(
            f"{path}:{number}: {line.decode().strip()!r:.60} is not a JSON object",
            fix='each line must be one, such as {"text": "…"}',
        )
    return row

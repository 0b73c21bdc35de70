"""Writes token files: as a stream, and under its name only once a file is complete."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from orchestrator.errors import TrainingError
from trainer.data.packing.tokenizer import Kind, Tokens, Vocabulary
from trainer.data.tokens import HEADER_BYTES, LONG, WORD, Header, Longs
from trainer.rank.durable import sync

COPIED = 1 << 20


class TokenWriter:
    """Takes tokens and documents in order; `finish` makes them a token file."""

    def __init__(self, file: BinaryIO, ends: BinaryIO, starts: BinaryIO, kind: Kind) -> None:
        self._file, self._ends, self._starts = file, ends, starts
        self._kind = kind
        self._hash = hashlib.sha256()
        self.num_tokens = 0
        self.num_documents = 0
        file.write(bytes(HEADER_BYTES))

    def add(self, tokens: Tokens, ends: Longs, learned_from: Longs) -> None:
        """`tokens`, and the documents that end among them."""
        self._append(tokens.astype(np.dtype(self._kind).newbyteorder("<"), copy=False).tobytes())
        self._ends.write(ends.astype(LONG).tobytes())
        self._starts.write(learned_from.astype(LONG).tobytes())
        self.num_tokens += len(tokens)
        self.num_documents += len(ends)

    def finish(self, vocabulary: Vocabulary, prompts: bool, made_from: str) -> Header:
        """Write what comes after the tokens, then the header."""
        self._append(bytes(-self._file.tell() % WORD))
        for spooled in (self._ends, self._starts) if prompts else (self._ends,):
            spooled.seek(0)
            while part := spooled.read(COPIED):
                self._append(part)
        header = Header(
            kind=self._kind,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            prompts=prompts,
            vocabulary=vocabulary,
            content=self._hash.hexdigest(),
            made_from=made_from,
        )
        self._file.seek(0)
        self._file.write(header.to_bytes())
        return header

    def _append(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)


@contextmanager
def writing(out: Path, kind: Kind) -> Iterator[TokenWriter]:
    """A writer whose file is renamed to `out` at the end; after an error nothing of it is left.

    Raises:
        TrainingError: when it cannot be written, for the disk is full, for example.
    """
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with (
            partial.open("wb") as file,
            tempfile.TemporaryFile(dir=out.parent) as ends,
            tempfile.TemporaryFile(dir=out.parent) as starts,
        ):
            yield TokenWriter(file, ends, starts, kind)
        sync(partial)
        partial.rename(out)
        sync(out.parent)
    except OSError as exc:
        raise TrainingError(
            f"{out} cannot be written: {exc.strerror or exc}",
            fix="give a folder with room and write permission",
        ) from exc
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def remove_partials(out: Path) -> None:
    """Remove what a killed process left of `out`; to be called where nobody else writes it."""
    for partial in out.parent.glob(f"{out.name}.partial-*"):
        partial.unlink(missing_ok=True)

"""Writes token files as a stream. A file gets its name only when it is complete."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EFBIG
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ndctl.rank.checkpoint_files import sync
from orchestrator.contract.files.atomic_write import NO_SPACE, why_not_written
from orchestrator.errors import TrainingError
from trainer.data.packing.tokenizer import Kind, Tokens, Vocabulary
from trainer.data.tokens import HEADER_BYTES, LONG, WORD, Header, Longs

COPY_BYTES = 1 << 20


class TokenWriter:
    """Takes tokens and documents in order; `finish` writes the rest and the header."""

    def __init__(self, file: BinaryIO, ends: BinaryIO, starts: BinaryIO, kind: Kind) -> None:
        self._file, self._ends, self._starts = file, ends, starts
        self._kind = kind
        self._hash = hashlib.sha256()
        self.num_tokens = 0
        self.num_documents = 0
        file.write(bytes(HEADER_BYTES))

    def add(self, tokens: Tokens, ends: Longs, learned_from: Longs) -> None:
        """Append `tokens`, and the documents that end in them."""
        self._append(tokens.astype(np.dtype(self._kind).newbyteorder("<"), copy=False).tobytes())
        self._ends.write(ends.astype(LONG).tobytes())
        self._starts.write(learned_from.astype(LONG).tobytes())
        self.num_tokens += len(tokens)
        self.num_documents += len(ends)

    def finish(self, vocabulary: Vocabulary, prompts: bool, made_from: str) -> Header:
        """Write the documents after the tokens, then the header."""
        self._append(bytes(-self._file.tell() % WORD))
        for spooled in (self._ends, self._starts) if prompts else (self._ends,):
            spooled.seek(0)
            while part := spooled.read(COPY_BYTES):
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
    """A writer whose file is renamed to `out` at the end, or removed after an error.

    Raises:
        TrainingError: writing failed, for example because the disk is full.
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
            f"failed to write {out}: {why_not_written(exc, out)}",
            fix=f"{_remedy(exc)} {out.parent}, or give another folder (of a job: --run-root)",
        ) from exc
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _remedy(exc: OSError) -> str:
    full = exc.errno in (*NO_SPACE, EFBIG)
    return "free space in" if full else "make it possible to write"


def remove_partials(out: Path) -> None:
    """Remove partial files that killed processes left. No other process may be writing `out`."""
    for partial in out.parent.glob(f"{out.name}.partial-*"):
        partial.unlink(missing_ok=True)

"""Token files: every source is packed into them before training, and all ranks read them.

    header      4096 bytes: a magic line and one JSON object, padded with spaces
    tokens      little-endian uint8, uint16 or uint32; all documents, concatenated
    documents   int64, aligned to 8 bytes: the end of each document; with prompts, followed by the
                start of the learned part of each document

`writer.py` gives a file its name only when it is complete. After that it never changes.
"""

import json
import mmap
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from orchestrator.contract.codec import decode, encode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.limits import AtLeast
from orchestrator.errors import TrainingError
from trainer.data.packing.tokenizer import Kind, Tokens, Vocabulary

MAGIC = b"ndctl-tokens 1\n"
HEADER_BYTES = 4096
WORD = 8
LONG = np.dtype("<i8")
Longs = NDArray[np.int64]


class Header(Struct, frozen=True, kw_only=True):
    kind: Kind
    num_tokens: Annotated[int, AtLeast(0)]
    num_documents: Annotated[int, AtLeast(0)]
    prompts: bool
    """Documents begin with a prompt, whose tokens are not learned."""
    vocabulary: Vocabulary
    content: str
    """sha256 of tokens and documents."""
    made_from: str
    """Hash of the sources and settings. The same hash gives the same file."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.kind).newbyteorder("<")

    @property
    def documents_at(self) -> int:
        end = HEADER_BYTES + self.num_tokens * self.dtype.itemsize
        return -(-end // WORD) * WORD

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.documents_at + self.num_documents * WORD * (1 + self.prompts)

    def to_bytes(self) -> bytes:
        text = MAGIC + json.dumps(encode(self)).encode()
        assert len(text) < HEADER_BYTES, "only the tokenizer's name is long, and it was truncated"
        return text.ljust(HEADER_BYTES - 1) + b"\n"


class TokenFile:
    """A complete token file, mapped into memory."""

    def __init__(self, path: str, expected: Header | None = None) -> None:
        """Open `path`; `expected` is the header that another rank read.

        Raises:
            TrainingError: the file is missing, incomplete, or differs from the expected one.
        """
        self.path = path
        self.header, self._map = _open(path)
        if expected is not None and expected != self.header:
            raise TrainingError(
                f"{path} on this host differs from the file on the first host",
                fix="copy the same file to every host, or use a shared file system",
            )
        header = self.header
        self._tokens: Tokens = np.frombuffer(
            self._map, header.dtype, header.num_tokens, HEADER_BYTES
        )
        documents: Longs = np.frombuffer(
            self._map, LONG, header.num_documents * (1 + header.prompts), header.documents_at
        )
        self.ends: Longs = documents[: header.num_documents]
        """The end (exclusive) of each document, its end token included."""
        self._learned_from: Longs = documents[header.num_documents :]

    def tokens(self, start: int, stop: int) -> Longs:
        """Tokens `start` to `stop`."""
        self._check_size()
        return self._tokens[start:stop].astype(np.int64)

    def learned(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens `start` to `stop` are learned."""
        if not self.header.prompts:
            return np.ones(stop - start, dtype=np.bool_)
        self._check_size()
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        at = np.arange(start, stop)
        document = first + np.searchsorted(self.ends[first : last + 1], at, side="right")
        found: NDArray[np.bool_] = at >= self._learned_from[document]
        return found

    def ends_between(self, start: int, stop: int) -> Longs:
        """Ends of documents, all above `start` and below `stop`."""
        self._check_size()
        first, last = np.searchsorted(self.ends, [start + 1, stop])
        return self.ends[first:last].astype(np.int64)

    def _check_size(self) -> None:
        # A read past the end of a mapped file raises no error; SIGBUS kills the process.
        if self._map.size() < self.header.size:
            raise TrainingError(
                f"{self.path} was truncated while it was in use",
                fix="do not write to files that a job trains on",
            )


def read_header(path: str) -> Header:
    """Raises TrainingError if `path` is not a complete token file."""
    return _open(path)[0]


def _open(path: str) -> tuple[Header, mmap.mmap]:
    try:
        with Path(path).open("rb") as file:
            text = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as exc:  # ValueError: an empty file cannot be mapped
        raise TrainingError(
            f"failed to open the token file {path}: {exc}",
            fix="put it where every host sees it under the same path",
        ) from exc
    header = parse_header(text, path)
    if size != header.size:
        raise TrainingError(
            f"{path} has {size} bytes, but its header says {header.size}",
            fix="copy it again, or pack it again with python -m trainer.data pack",
        )
    return header, mapped


def parse_header(text: bytes, path: str) -> Header:
    try:
        if not text.startswith(MAGIC):
            raise ValueError(f"it does not start with {MAGIC.strip().decode()!r}")
        header: Header = decode(Header, read_json(text.removeprefix(MAGIC)))
    except ValueError as exc:
        raise TrainingError(
            f"{path} is not a token file: {exc}",
            fix="make one with python -m trainer.data pack, or set data.format",
        ) from exc
    return header

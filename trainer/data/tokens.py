"""Token files: what every source becomes before training, and what all ranks read.

    header      4096 bytes: a magic line and one JSON object, filled up with spaces
    tokens      little-endian uint8, uint16 or uint32, all documents one after the other
    documents   int64, from the next multiple of 8 on: where each document ends; with prompts, then
                also where the part of each begins that is learned

A file appears under its name only when it is complete (`writer.py`), and never changes afterwards.
"""

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    kind: Kind
    num_tokens: Annotated[int, AtLeast(0)]
    num_documents: Annotated[int, AtLeast(0)]
    prompts: bool
    """Documents begin with tokens that are not learned."""
    vocabulary: Vocabulary
    content: str
    """sha256 of tokens and documents."""
    made_from: str
    """Hash of the sources and settings: with the same, the same file would be made again."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.kind).newbyteorder("<")

    @property
    def documents_at(self) -> int:
        end = HEADER_BYTES + self.num_tokens * self.dtype.itemsize
        return -(-end // WORD) * WORD

    @property
    def size(self) -> int:
        """Of the whole file, in bytes."""
        return self.documents_at + self.num_documents * WORD * (1 + self.prompts)

    def to_bytes(self) -> bytes:
        text = MAGIC + json.dumps(encode(self)).encode()
        assert len(text) < HEADER_BYTES, "a tokenizer's name is cut before it comes here"
        return text.ljust(HEADER_BYTES - 1) + b"\n"


class TokenFile:
    """A complete token file, mapped into memory."""

    def __init__(self, path: str, expected: Header | None = None) -> None:
        """Open `path`; `expected` is its header as another rank found it.

        Raises:
            TrainingError: when it is not there, not whole, or not the file that is expected.
        """
        self.path = path
        self.header, self._map = _open(path)
        if expected is not None and expected != self.header:
            raise TrainingError(
                f"{path} is another file on this host than on the first one",
                fix="put the same file on every host, or the folder on a shared file system",
            )
        header = self.header
        self._tokens: Tokens = np.frombuffer(
            self._map, header.dtype, header.num_tokens, HEADER_BYTES
        )
        documents: Longs = np.frombuffer(
            self._map, LONG, header.num_documents * (1 + header.prompts), header.documents_at
        )
        self.ends: Longs = documents[: header.num_documents]
        """Where each document ends: after its end token."""
        self._learned_from: Longs = documents[header.num_documents :]

    def tokens(self, start: int, stop: int) -> Longs:
        """Tokens `start` to `stop`."""
        self._check_size()
        return self._tokens[start:stop].astype(np.int64)

    def learned(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens `start` to `stop` are to be learned."""
        if not self.header.prompts:
            return np.ones(stop - start, dtype=np.bool_)
        self._check_size()
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        at = np.arange(start, stop)
        document = first + np.searchsorted(self.ends[first : last + 1], at, side="right")
        found: NDArray[np.bool_] = at >= self._learned_from[document]
        return found

    def _check_size(self) -> None:
        # To read past the end of a mapped file is not an error but the end of the process.
        if self._map.size() < self.header.size:
            raise TrainingError(
                f"{self.path} has become shorter while it was being read",
                fix="train on files that nobody writes to",
            )


def read_header(path: str) -> Header:
    """Raises TrainingError when `path` is no complete token file."""
    return _open(path)[0]


def _open(path: str) -> tuple[Header, mmap.mmap]:
    try:
        with Path(path).open("rb") as file:
            text = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as exc:  # nothing can be mapped of an empty file
        raise TrainingError(
            f"the token file {path} cannot be opened: {exc}",
            fix="put it where every host sees it under the same name",
        ) from exc
    header = parse_header(text, path)
    if size != header.size:
        raise TrainingError(
            f"{path} has {size} bytes, and its header says {header.size}",
            fix="copy it again, or make it again with python -m trainer.data pack",
        )
    return header, mapped


def parse_header(text: bytes, path: str) -> Header:
    try:
        if not text.startswith(MAGIC):
            raise ValueError(f"it does not begin with {MAGIC.strip().decode()!r}")
        header: Header = decode(Header, read_json(text.removeprefix(MAGIC)))
    except ValueError as exc:
        raise TrainingError(
            f"{path} is no token file: {exc}",
            fix="make one with python -m trainer.data pack, or set data.format",
        ) from exc
    return header

"""Token files as one long row, cut into training sequences and held-out sequences.

Sequence n begins at token n * length and has length + 1 tokens. All but the last are inputs, and
all but the first are labels, so each token except the first is predicted in exactly one sequence.
Documents are separated by an end token, and sequences are cut at fixed lengths, as in GPT-3 and
Megatron-LM. The first token of a document is predicted like any other. `document_starts` is for
attention that does not cross the ends of documents.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from trainer.data.tokens import Longs, TokenFile
from trainer.model.chunked_loss import NOT_LEARNED


class TokenRow:
    """Concatenated token files."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._files = files
        self._ends = list(accumulate(file.header.num_tokens for file in files))

    def read(self, start: int, stop: int) -> tuple[Longs, Longs]:
        """Tokens `start` to `stop`, and their labels: `NOT_LEARNED` for tokens of a prompt."""
        tokens, labels = [], []
        at = bisect_right(self._ends, start)
        while start < stop:
            file, first = self._files[at], self._ends[at - 1] if at else 0
            end = min(stop, self._ends[at])
            part = file.tokens(start - first, end - first)
            tokens.append(part)
            learned = file.learned(start - first, end - first)
            labels.append(part if learned.all() else np.where(learned, part, NOT_LEARNED))
            start, at = end, at + 1
        return np.concatenate(tokens), np.concatenate(labels)

    def document_starts(self, start: int, stop: int) -> Longs:
        """For each of the tokens `start` to `stop`, where the first of them that belongs to the
        same document is, counted from `start`."""
        starts = np.zeros(stop - start, dtype=np.int64)
        begin, at = start, bisect_right(self._ends, start)
        while begin < stop:
            file, first = self._files[at], self._ends[at - 1] if at else 0
            end = min(stop, self._ends[at])
            ends = file.ends_between(begin - first, end - first) + (first - start)
            starts[ends] = ends
            # The next file begins with another document.
            if end < stop:
                starts[end - start] = end - start
            begin, at = end, at + 1
        return np.maximum.accumulate(starts)


@dataclass(frozen=True, slots=True)
class Sequences:
    """`num` consecutive sequences of a row."""

    row: TokenRow
    length: int
    """Input tokens of one sequence."""
    first: int
    """Index in the row of the first sequence."""
    num: int

    def read(self, sequence: int) -> tuple[Longs, Longs]:
        """Inputs and labels of a sequence, `length` tokens each; `sequence` counts from 0."""
        start = (self.first + sequence) * self.length
        tokens, labels = self.row.read(start, start + self.length + 1)
        return tokens[:-1], labels[1:]

    def document_starts(self, sequence: int) -> Longs:
        """For each input of a sequence, the place of the first input of its document."""
        start = (self.first + sequence) * self.length
        return self.row.document_starts(start, start + self.length)


def num_sequences(num_tokens: int, length: int) -> int:
    return max(0, num_tokens - 1) // length


def num_held_out(num: int, fraction: float | None) -> int:
    """How many of `num` sequences, at the end, are held out: at least 1 if `fraction` is set."""
    return 0 if fraction is None else math.ceil(num * fraction)


def fingerprint(contents: Sequence[str], num: int) -> str:
    """A hash of everything that decides which tokens sample n of `num` has."""
    return hashlib.sha256(repr((list(contents), num)).encode()).hexdigest()

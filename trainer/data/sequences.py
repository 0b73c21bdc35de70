"""Token files as one long row, cut into the sequences that are trained on and those held out.

Sequence n begins at token n * length and has length + 1 tokens: each is fed but the last, which is
only predicted. So every token but the first is predicted in exactly one sequence. Documents follow
each other with only the end token between them, and sequences are cut wherever their length says,
as in GPT-3, Megatron-LM and torchtitan by default: attention sees across the end of a document, and
the first token of the next one is predicted like any other.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from trainer.data.tokens import Longs, TokenFile
from trainer.loss import NOT_LEARNED


class TokenRow:
    """Token files one after the other."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._files = files
        self._ends = list(accumulate(file.header.num_tokens for file in files))

    def read(self, start: int, stop: int) -> tuple[Longs, Longs]:
        """Tokens `start` to `stop`, and the same with `NOT_LEARNED` where that is so."""
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


@dataclass(frozen=True, slots=True)
class Sequences:
    """Some of the sequences of a row, counted from 0."""

    row: TokenRow
    length: int
    """Tokens that one feeds to the model."""
    first: int
    """Which of the row's sequences is the first of these."""
    num: int

    def read(self, sequence: int) -> tuple[Longs, Longs]:
        """What a sequence feeds, and what is to be predicted at each place: `length` tokens."""
        start = (self.first + sequence) * self.length
        tokens, labels = self.row.read(start, start + self.length + 1)
        return tokens[:-1], labels[1:]


def num_sequences(num_tokens: int, length: int) -> int:
    return max(0, num_tokens - 1) // length


def num_held_out(num: int, fraction: float | None) -> int:
    """Of `num` sequences, those at the end that are not trained on: some, where any are wanted."""
    return 0 if fraction is None else math.ceil(num * fraction)


def fingerprint(contents: Sequence[str], num: int) -> str:
    """Changes with anything that decides which tokens sample n of `num` holds."""
    return hashlib.sha256(repr((list(contents), num)).encode()).hexdigest()

"""Documents of packed sequences: which queries and keys of two tensors share one.

No mask is needed. Two chunks of a sequence share at most one document: that of the last token of
the earlier chunk. All of its tokens in the later chunk see all of its tokens in the earlier one. So
a rank's queries and the keys of others need at most one whole block of scores per pair of chunks.
Among a rank's own tokens the scores of a document are causal. No score of two documents is
computed, so short documents cost less.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from trainer.parallel.context.blocks import Part
from trainer.parallel.context.kernels import Ends


class Chunk(NamedTuple):
    """Consecutive tokens of a sequence."""

    first: int
    stop: int
    """Exclusive."""
    at: int
    """Where they begin in a tensor."""


def zigzag(rank: int, num_ranks: int, tokens: int) -> tuple[Chunk, Chunk]:
    """The chunks of a rank with `tokens` tokens, in the order of its tensors."""
    half = tokens // 2
    late = (2 * num_ranks - 1 - rank) * half
    return Chunk(rank * half, (rank + 1) * half, 0), Chunk(late, late + half, half)


def own_ends(starts_BS: torch.Tensor | None, tokens: int, group: ProcessGroup) -> Ends | None:
    """Where documents end among the `tokens` tokens of this rank of `group`. Tokens of a document
    are adjacent, also where the tokens between them belong to other ranks."""
    if starts_BS is None:
        return None
    chunks = zigzag(group.rank(), group.size(), tokens)
    return ends_of(torch.cat([starts_BS[:, it.first : it.stop] for it in chunks], dim=1))


def ends_of(starts_BT: torch.Tensor) -> Ends:
    """Where documents end: the places after which `starts_BT` changes."""
    return tuple(_ends(row) for row in starts_BT)


def _ends(starts_T: torch.Tensor) -> tuple[int, ...]:
    begins = (starts_T[1:] != starts_T[:-1]).nonzero().squeeze(1) + 1
    return (*begins.tolist(), len(starts_T))


def shared_parts(
    starts_BS: torch.Tensor, queries: Sequence[Chunk], keys: Sequence[Chunk]
) -> Iterator[Part]:
    """The blocks of scores between the tokens of `queries` and those of earlier chunks of `keys`.
    Chunks of both are disjoint or equal."""
    for sequence, starts_S in enumerate(starts_BS):
        for late in queries:
            start = int(starts_S[late.first])
            for early in keys:
                if early.stop <= late.first and start < early.stop:
                    same = starts_S[late.first : late.stop] == start
                    yield Part(
                        slice(late.at, late.at + int(same.sum())),
                        slice(early.at + max(0, start - early.first), _stop(early)),
                        sequences=slice(sequence, sequence + 1),
                    )


def _stop(chunk: Chunk) -> int:
    return chunk.at + chunk.stop - chunk.first

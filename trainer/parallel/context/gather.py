"""Attention over gathered keys: each rank of axis cp gathers all keys and values at once.

Llama 3 was trained like this (Grattafiori et al. 2024, section 3.3.2), with zigzag chunks. Only the
rank's own keys are stored for the backward pass, which gathers the others again.
"""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import (
    all_gather_single,
    reduce_scatter_single,
    wait_tensor,
)

from trainer.parallel.context.blocks import ALL, OWN, Attention, Gradients, Part, add_
from trainer.parallel.context.documents import Chunk, own_ends, shared_parts, zigzag
from trainer.parallel.context.kernels import AttentionOutput
from trainer.parallel.context.operator import attention_operator


def gather(kv_2BHTD: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Keys and values of all ranks, [rank, 2, B, H, T, D]. The first use waits for the transfer."""
    return all_gather_single(kv_2BHTD.contiguous(), 0, group).unflatten(0, (group.size(), 2))


def in_sequence(ranks_R2BHTD: torch.Tensor) -> torch.Tensor:
    """The tokens of all ranks in the order of the sequence, [2, B, H, all tokens, D]."""
    first, second = ranks_R2BHTD.unflatten(4, (2, -1)).unbind(4)
    return torch.cat([first, second.flip(0)]).movedim(0, 3).flatten(3, 4)


def by_rank(whole_2BHSD: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """The inverse of `in_sequence`."""
    chunks = whole_2BHSD.unflatten(3, (2 * num_ranks, -1)).movedim(3, 0)
    first, second = chunks.chunk(2)
    return torch.stack([first, second.flip(0)], 4).flatten(4, 5)


def parts_beyond_own(rank: int, num_ranks: int, tokens: int) -> Iterator[Part]:
    """The keys of other ranks that a rank's queries attend to, as slices of the whole sequence."""
    half = tokens // 2
    if rank > 0:
        yield Part(ALL, slice(0, rank * half))
    if rank < num_ranks - 1:
        # Between the rank's two chunks.
        yield Part(slice(half, None), slice((rank + 1) * half, (2 * num_ranks - 1 - rank) * half))


def parts_of_others(
    rank: int, num_ranks: int, tokens: int, starts_BS: torch.Tensor | None
) -> Iterable[Part]:
    """`parts_beyond_own`, if no query attends to another document."""
    if starts_BS is None:
        return parts_beyond_own(rank, num_ranks, tokens)
    own = zigzag(rank, num_ranks, tokens)
    between = (0, own[0].first), (own[0].stop, own[1].first)
    return shared_parts(starts_BS, own, [Chunk(a, b, a) for a, b in between if a < b])


def _forward(
    q_BHTD: torch.Tensor,
    kv_2BHTD: torch.Tensor,
    scale: float,
    group: ProcessGroup,
    starts_BS: torch.Tensor | None,
) -> AttentionOutput:
    gathered_R2BHTD = gather(kv_2BHTD, group)
    tokens = q_BHTD.shape[2]
    attention = Attention(q_BHTD, kv_2BHTD, scale, own_ends(starts_BS, tokens, group))
    whole_2BHSD = in_sequence(gathered_R2BHTD)
    for part in parts_of_others(group.rank(), group.size(), tokens, starts_BS):
        attention.add(part, whole_2BHSD)
    return attention.output()


def _backward(  # noqa: PLR0913 (the operator's arguments)
    grad_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    kv_2BHTD: torch.Tensor,
    output: AttentionOutput,
    scale: float,
    group: ProcessGroup,
    starts_BS: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    gathered_R2BHTD = gather(kv_2BHTD, group)
    tokens = q_BHTD.shape[2]
    ends = own_ends(starts_BS, tokens, group)
    gradients = Gradients(grad_BHTD, q_BHTD, output, scale, ends)
    own = gradients.backward(OWN, kv_2BHTD)
    whole_2BHSD = in_sequence(gathered_R2BHTD)
    others = gradients.zeros_like(whole_2BHSD)
    for part in parts_of_others(group.rank(), group.size(), tokens, starts_BS):
        add_(others, part, gradients.backward(part, whole_2BHSD))
    pieces = by_rank(others, group.size()).flatten(0, 1)
    dkv_2BHTD = wait_tensor(reduce_scatter_single(pieces, "sum", 0, group))
    add_(dkv_2BHTD, OWN, own)
    return gradients.of_queries(), dkv_2BHTD.to(kv_2BHTD.dtype)


gathered_attention = attention_operator("gathered_attention", _forward, _backward)

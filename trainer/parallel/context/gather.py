"""Attention over gathered keys: each rank of axis cp gathers all keys and values at once.

Llama 3 was trained like this (Grattafiori et al. 2024, section 3.3.2), with zigzag chunks. Only the
rank's own keys are stored for the backward pass, which gathers the others again.
"""

from collections.abc import Iterator

import torch
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import (
    all_gather_single,
    reduce_scatter_single,
    wait_tensor,
)

from trainer.parallel.context.blocks import ALL, OWN, Attention, Gradients, Part, add_
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


def _forward(
    q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float, group: ProcessGroup
) -> AttentionOutput:
    gathered_R2BHTD = gather(kv_2BHTD, group)
    attention = Attention(q_BHTD, kv_2BHTD, scale)
    whole_2BHSD = in_sequence(gathered_R2BHTD)
    for part in parts_beyond_own(group.rank(), group.size(), q_BHTD.shape[2]):
        attention.add(part, whole_2BHSD)
    return attention.output()


def _backward(
    grad_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    kv_2BHTD: torch.Tensor,
    output: AttentionOutput,
    scale: float,
    group: ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    gathered_R2BHTD = gather(kv_2BHTD, group)
    gradients = Gradients(grad_BHTD, q_BHTD, output, scale)
    own = gradients.backward(OWN, kv_2BHTD)
    whole_2BHSD = in_sequence(gathered_R2BHTD)
    others = gradients.zeros_like(whole_2BHSD)
    for part in parts_beyond_own(group.rank(), group.size(), q_BHTD.shape[2]):
        add_(others, part, gradients.backward(part, whole_2BHSD))
    pieces = by_rank(others, group.size()).flatten(0, 1)
    dkv_2BHTD = wait_tensor(reduce_scatter_single(pieces, "sum", 0, group))
    add_(dkv_2BHTD, OWN, own)
    return gradients.of_queries(), dkv_2BHTD.to(kv_2BHTD.dtype)


gathered_attention = attention_operator("gathered_attention", _forward, _backward)

"""Ring attention: keys and values are sent around the ranks of axis cp, and each attends to them.

It follows Liu et al. 2023, "Ring Attention with Blockwise Transformers", with zigzag chunks: rank r
has chunks r and 2n-1-r of 2n, so all ranks have the same work at each hop. The transfer of the next
keys overlaps with the attention to the current ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.parallel.context.blocks import ALL, OWN, Attention, Gradients, Part, add_
from trainer.parallel.context.documents import own_ends, shared_parts, zigzag
from trainer.parallel.context.kernels import AttentionOutput
from trainer.parallel.context.operator import attention_operator


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that is being sent to the next rank, and one being received from the previous."""

    sent: torch.Tensor
    """Referenced here, so that it is not freed before it is sent."""
    received: torch.Tensor
    works: list[dist.Work]

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def send_to_next(tensor: torch.Tensor, group: ProcessGroup) -> Transfer:
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=group, group_peer=before),
        ]
    )
    return Transfer(tensor, received, works)


def part_at(hop: int, rank: int, num_ranks: int, tokens: int) -> Part:
    """Which of the keys that arrive at `hop` a rank's queries attend to; `tokens` per rank."""
    if hop == 0:
        return OWN
    owner = (rank - hop) % num_ranks
    half = tokens // 2
    if owner < rank:
        # The owner's first chunk is before both chunks of this rank, its second after both.
        return Part(ALL, slice(0, half))
    # Both chunks of the owner are after the first and before the second chunk of this rank.
    return Part(slice(half, None), ALL)


def parts_at(
    hop: int, rank: int, num_ranks: int, tokens: int, starts_BS: torch.Tensor | None
) -> Iterable[Part]:
    """`part_at`, if no query attends to another document."""
    if starts_BS is None or hop == 0:
        return [part_at(hop, rank, num_ranks, tokens)]
    own, theirs = (zigzag(at % num_ranks, num_ranks, tokens) for at in (rank, rank - hop))
    return shared_parts(starts_BS, own, theirs)


def _forward(
    q_BHTD: torch.Tensor,
    kv_2BHTD: torch.Tensor,
    scale: float,
    group: ProcessGroup,
    starts_BS: torch.Tensor | None,
) -> AttentionOutput:
    last, tokens = group.size() - 1, q_BHTD.shape[2]
    transfer = send_to_next(kv_2BHTD, group)
    attention = Attention(q_BHTD, kv_2BHTD, scale, own_ends(starts_BS, tokens, group))
    for hop in range(1, group.size()):
        kv_2BHTD = transfer.wait()
        if hop < last:
            transfer = send_to_next(kv_2BHTD, group)
        for part in parts_at(hop, group.rank(), group.size(), tokens, starts_BS):
            attention.add(part, kv_2BHTD)
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
    """Keys go around as in the forward pass; the sums of their gradients follow one hop behind."""
    last, tokens = group.size() - 1, q_BHTD.shape[2]
    ends = own_ends(starts_BS, tokens, group)
    gradients = Gradients(grad_BHTD, q_BHTD, output, scale, ends)
    sums: Transfer | None = None
    for hop in range(group.size()):
        transfer = send_to_next(kv_2BHTD, group) if hop < last else None
        parts = parts_at(hop, group.rank(), group.size(), tokens, starts_BS)
        more = [(part, gradients.backward(part, kv_2BHTD)) for part in parts]
        dkv_2BHTD = gradients.zeros_like(kv_2BHTD) if sums is None else sums.wait()
        for part, gradient in more:
            add_(dkv_2BHTD, part, gradient)
        # At the last hop the sums are at the rank before the owner, so they are sent once more.
        sums = send_to_next(dkv_2BHTD, group)
        if transfer is not None:
            kv_2BHTD = transfer.wait()
    assert sums is not None
    return gradients.of_queries(), sums.wait().to(kv_2BHTD.dtype)


ring_attention = attention_operator("ring_attention", _forward, _backward)

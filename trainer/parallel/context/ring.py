"""Ring attention: keys and values travel around the ranks of axis cp while each attends to them.

After Liu et al. 2023, "Ring Attention with Blockwise Transformers", with the sequence dealt out in
zigzag: of 2n chunks, rank r has chunk r and chunk 2n-1-r, so every rank has as much to do at every
hop. A hop's transfer runs while the keys at hand are attended to.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.parallel.context.blocks import ALL, OWN, Attention, Gradients, Part, add_
from trainer.parallel.context.kernels import Answer
from trainer.parallel.context.operator import attention_operator


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor on its way to the next rank, and its like on the way from the one before."""

    sent: torch.Tensor
    """Held here, for it must not be freed before it is gone."""
    received: torch.Tensor
    works: list[dist.Work]

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def pass_on(tensor: torch.Tensor, group: ProcessGroup) -> Transfer:
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
    """What a rank's queries see of the keys that reach it at `hop`, each a rank's `tokens`."""
    if hop == 0:
        return OWN
    owner = (rank - hop) % num_ranks
    half = tokens // 2
    if owner < rank:
        # Their first chunk is before both of ours, their second after both.
        return Part(ALL, slice(0, half))
    # Both their chunks are after our first and before our second.
    return Part(slice(half, None), ALL)


def _forward(
    q_BHTD: torch.Tensor, kv_2BHTD: torch.Tensor, scale: float, group: ProcessGroup
) -> Answer:
    last, tokens = group.size() - 1, q_BHTD.shape[2]
    transfer = pass_on(kv_2BHTD, group)
    attention = Attention(q_BHTD, kv_2BHTD, scale)
    for hop in range(1, group.size()):
        kv_2BHTD = transfer.wait()
        if hop < last:
            transfer = pass_on(kv_2BHTD, group)
        attention.see(part_at(hop, group.rank(), group.size(), tokens), kv_2BHTD)
    return attention.answer()


def _backward(
    grad_BHTD: torch.Tensor,
    q_BHTD: torch.Tensor,
    kv_2BHTD: torch.Tensor,
    answer: Answer,
    scale: float,
    group: ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys travel as in the forward pass, and the sums of their gradients a hop behind them."""
    last, tokens = group.size() - 1, q_BHTD.shape[2]
    gradients = Gradients(grad_BHTD, q_BHTD, answer, scale)
    sums: Transfer | None = None
    for hop in range(group.size()):
        transfer = pass_on(kv_2BHTD, group) if hop < last else None
        part = part_at(hop, group.rank(), group.size(), tokens)
        more = gradients.see(part, kv_2BHTD)
        dkv_2BHTD = gradients.no_keys(kv_2BHTD) if sums is None else sums.wait()
        add_(dkv_2BHTD, part, more)
        # After the last hop they are one rank short of the keys' owner.
        sums = pass_on(dkv_2BHTD, group)
        if transfer is not None:
            kv_2BHTD = transfer.wait()
    assert sums is not None
    return gradients.of_queries(), sums.wait().to(kv_2BHTD.dtype)


ring_attention = attention_operator("ring_attention", _forward, _backward)

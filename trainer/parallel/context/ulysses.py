"""Ulysses: an all-to-all gives each rank of axis cp the whole sequence for a part of the heads.

It follows Jacobs et al. 2023, "DeepSpeed Ulysses". A second all-to-all gives each rank all heads of
its own tokens again. Each rank has a contiguous piece of the sequence.
"""

import torch
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import scaled_dot_product_attention

from trainer.model.attention import Attend
from trainer.parallel.context.in_documents import attend_in_documents


def ulysses_attention(group: ProcessGroup) -> Attend:
    ranks = group.size()

    def attend(
        q_BHTD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        scale: float,
        starts_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        # With fewer kv heads than ranks, each rank that shares a head gets a copy of it.
        copies = max(1, ranks // k_BHTD.shape[1])
        k_BHTD, v_BHTD = (x.repeat_interleave(copies, 1) for x in (k_BHTD, v_BHTD))
        mixed_BHTD = to_whole_sequence([q_BHTD, k_BHTD, v_BHTD], group)
        heads = [x.shape[1] // ranks for x in (q_BHTD, k_BHTD, v_BHTD)]
        q, k, v = mixed_BHTD.split(heads, dim=1)
        if starts_BS is None:
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=heads[0] != heads[1]
            )
        else:
            out = attend_in_documents(q, k, v, scale, starts_BS)
        return to_all_heads(out, group)

    return attend


def to_whole_sequence(tensors_BHTD: list[torch.Tensor], group: ProcessGroup) -> torch.Tensor:
    """This rank's share of the heads of each tensor, for all tokens. The heads of the tensors are
    concatenated."""
    ranks = group.size()
    by_rank_BRHTD = torch.cat([x.unflatten(1, (ranks, -1)) for x in tensors_BHTD], dim=2)
    pieces_RBHTD = exchange(by_rank_BRHTD.movedim(1, 0), group)
    return pieces_RBHTD.movedim(0, 2).flatten(2, 3)


def to_all_heads(out_BHSD: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All heads of this rank's tokens: the inverse of `to_whole_sequence` for one tensor."""
    pieces_RBHTD = exchange(out_BHSD.unflatten(2, (group.size(), -1)).movedim(2, 0), group)
    return pieces_RBHTD.movedim(0, 1).flatten(1, 2)


def exchange(pieces: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Send piece n to rank n; piece n of the result comes from rank n. Differentiable."""
    return all_to_all_single_autograd(pieces.contiguous(), None, None, group)

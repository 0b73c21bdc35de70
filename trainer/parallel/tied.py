"""A tied matrix whose copies are on two pipeline stages: both learn from both gradients.

The first stage embeds with it and the last one projects with it. They start equal, for both are
drawn or loaded under one name; with equal gradients they stay so, bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class TiedWeight:
    copies: Sequence[nn.Parameter]
    """This rank's: none, one, or both where first and last stage are on one rank."""
    group: dist.ProcessGroup
    """The pipeline's ranks."""

    def add_gradients(self) -> None:
        """Give both copies the sum of their gradients, which are complete for each."""
        gradients = [_local(g) for copy in self.copies if (g := _cut_alike(copy)) is not None]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif gradients:
            # Each adds the same two numbers, so the sums are equal to the last bit.
            gradients[0] += _exchanged(gradients[0], self.group)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Make both copies of a rank equal after a load, which fills the last stage's alone: a
        state has one tensor of a name."""
        if len(self.copies) < 2:
            return
        stale, loaded = self.copies
        pairs = [(stale.detach(), loaded.detach())]
        states = optimizer.state[stale], optimizer.state[loaded]
        pairs += [(states[0][key], value) for key, value in states[1].items()]
        for target, source in pairs:
            if isinstance(target, torch.Tensor):
                _local(target).copy_(_local(source))


def find_tied(stages: Sequence[Decoder], group: dist.ProcessGroup) -> TiedWeight:
    """Of the stages of this rank; a stage that is the whole model has one matrix and no copy."""
    copies = []
    for stage in stages:
        end = stage.embedding or stage.head
        if stage.tied and end is not None and not (stage.part.is_first and stage.part.is_last):
            copies.append(end.get_parameter("weight"))
    # Frozen ones have no gradients, and are equal as they are.
    copies = [copy for copy in copies if copy.requires_grad]
    return TiedWeight(copies, group)


def _cut_alike(copy: nn.Parameter) -> torch.Tensor | None:
    """The gradient of `copy`, cut as it is: under tensor parallel an embedding's comes whole, and a
    head's does not."""
    if isinstance(copy, DTensor) and isinstance(copy.grad, DTensor):
        copy.grad = copy.grad.redistribute(placements=copy.placements)
    return copy.grad


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _exchanged(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What the rank at the other end of the pipeline has in place of `tensor`."""
    ends = [0, dist.get_world_size(group) - 1]
    other = ends[dist.get_rank(group) == 0]
    theirs = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
        ]
    )
    for work in works:
        work.wait()
    return theirs

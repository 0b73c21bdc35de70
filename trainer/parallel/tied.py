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
from trainer.model.regions import local_part
from trainer.parallel.data import updated_as


@dataclass(frozen=True, slots=True)
class TiedWeight:
    weights: Sequence[nn.Parameter]
    """This rank's copies: none, one, or both where first and last stage are on one rank."""
    group: dist.ProcessGroup
    """The pipeline's ranks."""

    @property
    def copies(self) -> list[nn.Parameter]:
        """What the optimizer works on in place of `weights`."""
        return [updated_as(weight) for weight in self.weights]

    def add_gradients(self) -> None:
        """Give both copies the sum of their gradients, which are complete for each."""
        gradients = [local_part(g) for copy in self.copies if (g := _cut_alike(copy)) is not None]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif gradients:
            # Each adds the same two numbers, so the sums are equal to the last bit.
            gradients[0] += _exchanged(gradients[0], self.group)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Make both copies of a rank equal after a load, which fills the last stage's alone: a
        state has one tensor of a name."""
        if len(self.weights) < 2:
            return
        pairs = [(self.weights[0].detach(), self.weights[1].detach())]
        stale, loaded = (optimizer.state[copy] for copy in self.copies)
        pairs += [(stale[key], value) for key, value in loaded.items()]
        for target, source in pairs:
            if isinstance(target, torch.Tensor):
                local_part(target).copy_(local_part(source))


def find_tied(stages: Sequence[Decoder], group: dist.ProcessGroup) -> TiedWeight:
    """Of the stages of this rank; a stage that is the whole model has one matrix and no copy."""
    weights = []
    for stage in stages:
        end = stage.embedding or stage.head
        if stage.tied and end is not None and not (stage.part.is_first and stage.part.is_last):
            weights.append(end.get_parameter("weight"))
    # Frozen ones have no gradients, and are equal as they are.
    return TiedWeight([weight for weight in weights if weight.requires_grad], group)


def _cut_alike(copy: nn.Parameter) -> torch.Tensor | None:
    """The gradient of `copy`, cut as it is: under tensor parallel an embedding's comes whole, and a
    head's does not."""
    if isinstance(copy, DTensor) and isinstance(copy.grad, DTensor):
        copy.grad = copy.grad.redistribute(placements=copy.placements)
    return copy.grad


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

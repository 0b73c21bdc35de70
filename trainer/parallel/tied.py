"""Tied embeddings in a pipeline: two stages hold a copy, and each gets the sum of both gradients.

The first stage uses the matrix as embedding, the last one as head. Both are initialised or loaded
under one name, so they start equal. With equal gradients they stay equal bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trainer.model.decoder import Decoder
from trainer.model.regions import local_part
from trainer.parallel.data import updated_as


@dataclass(frozen=True, slots=True)
class TiedWeight:
    weights: Sequence[nn.Parameter]
    """This rank's copies: none, one, or both if it has the first and the last stage."""
    group: dist.ProcessGroup
    """The pipeline's ranks."""

    @property
    def copies(self) -> list[nn.Parameter]:
        """The parameters of `weights` in the optimizer."""
        return [updated_as(weight) for weight in self.weights]

    def add_gradients(self) -> None:
        """Set the gradients of both copies to their sum, once each is complete."""
        gradients = [local_part(g) for copy in self.copies if (g := copy.grad) is not None]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif gradients:
            # Both ranks add the same two numbers, so the sums are bit-identical.
            gradients[0] += _other_stage(gradients[0], self.group)

    def sync_after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Make both copies on one rank equal after a checkpoint is loaded. The state has one tensor
        per name, so the load fills only the copy of the last stage."""
        if len(self.weights) < 2:
            return
        pairs = [(self.weights[0].detach(), self.weights[1].detach())]
        stale, loaded = (optimizer.state[copy] for copy in self.copies)
        pairs += [(stale[key], value) for key, value in loaded.items()]
        for target, source in pairs:
            if isinstance(target, torch.Tensor):
                local_part(target).copy_(local_part(source))


def find_tied(stages: Sequence[Decoder], group: dist.ProcessGroup) -> TiedWeight:
    """The tied weights of this rank's stages; none if one stage is the whole model."""
    weights = []
    for stage in stages:
        end = stage.embedding or stage.head
        if stage.tied and end is not None and not (stage.part.is_first and stage.part.is_last):
            weights.append(end.get_parameter("weight"))
    # Frozen copies have no gradients, so they stay equal.
    return TiedWeight([weight for weight in weights if weight.requires_grad], group)


def _other_stage(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor of the rank at the other end of the pipeline, in exchange for `tensor`."""
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

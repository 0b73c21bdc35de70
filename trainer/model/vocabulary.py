"""The two modules with a weight row for each token of the vocabulary: embedding and head.

Under tensor parallel each rank has part of the rows.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, linear

from trainer.model.sequence import gather_sequence, local_weight, scatter_sequence, tensor_ranks

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states [batch, tokens, features], weights [vocabulary, features] and labels [batch,
tokens] to a scalar."""


class Embedding(nn.Embedding):
    def __init__(self, embedding: nn.Embedding) -> None:
        """Takes over the weights of `embedding`."""
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = embedding.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, tokens] to hidden states, under tensor parallel of this rank's part of
        the sequence."""
        weight = self.weight
        if not isinstance(weight, DTensor):
            return super().forward(input)
        rows_VD = local_weight(weight)
        own_BT = input - weight.device_mesh.get_local_rank() * len(rows_VD)
        here_BT = (own_BT >= 0) & (own_BT < len(rows_VD))
        hidden_BTD = embedding(own_BT.clamp(0, len(rows_VD) - 1), rows_VD)
        hidden_BTD = hidden_BTD * here_BT.unsqueeze(-1)
        return scatter_sequence(hidden_BTD, tensor_ranks(weight))


class Head(nn.Linear):
    """The loss is computed inside the module, where FSDP has gathered the weights."""

    def __init__(self, linear: nn.Linear) -> None:
        """Takes over the weights of `linear`. No supported model has a bias there."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        assert linear.bias is None
        self.weight = linear.weight

    def forward(
        self, input: torch.Tensor, labels: torch.Tensor | None = None, loss: Loss | None = None
    ) -> torch.Tensor:
        """Hidden states [batch, tokens, features] to logits, or with `labels` to their loss. Under
        tensor parallel the hidden states are those of this rank's part of the sequence, and the
        logits those of its part of the vocabulary."""
        if isinstance(self.weight, DTensor):
            input = gather_sequence(input, tensor_ranks(self.weight))
        if labels is None:
            return linear(input, local_weight(self.weight))
        assert loss is not None
        return loss(input, self.weight, labels)

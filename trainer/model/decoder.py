"""`Decoder`: consecutive decoder layers, plus the embedding before or the head after them.

A pipeline stage is a `Decoder` of some layers; without a pipeline one `Decoder` is the whole model.
Its parameters keep their names of the transformers model, so that checkpoints do not depend on the
stages.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from trainer.data.documents import Documents
from trainer.model.families import Family, family_of
from trainer.model.vocabulary import Embedding, Head, Loss

WRAPPERS = ("_checkpoint_wrapped_module.", "base_layer.")
"""Prefixes that activation checkpointing and adapters insert into parameter names."""


class NamedWeights(Protocol):
    """Something whose weights can be initialised by name: a decoder, or some tensors of one."""

    config: PretrainedConfig

    def plain_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Reduction(Protocol):
    """How a decoder's gradients are averaged over the data-parallel ranks (`parallel/data.py`)."""

    def in_backward(self, last: bool) -> None:
        """See `reduce_gradients_in_backward`."""

    def finish(self) -> None:
        """See `finish_reducing_gradients`."""


def is_adapter(name: str) -> bool:
    """Whether the parameter belongs to an adapter."""
    return ".lora_" in name


@dataclass(frozen=True, slots=True)
class StageSlice:
    """Layers `first` to `stop` (exclusive) of a model of `num_layers`."""

    first: int
    stop: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers


class Decoder(nn.Module):
    def __init__(self, model: PreTrainedModel, part: StageSlice) -> None:
        super().__init__()
        self.config: PretrainedConfig = model.config
        self.family: Family = family_of(model.config)
        self.part = part
        self.positions_1T = torch.empty(0, dtype=torch.long)
        """Position in the whole sequence of each token of this rank; see `set_positions`."""
        self.quantised: frozenset[str] = frozenset()
        """Plain names of the 4-bit weights; see `model/quantize.py`."""
        self.loss: Loss | None = None
        """What `forward` computes on the last stage if it gets labels."""
        self.autocast_dtype: torch.dtype | None = None
        """Type of the products and hidden states, if the weights are wider; see `autocast`."""
        self.reduction: Reduction | None = None
        """None: nothing to average."""
        self.replicas: DeviceMesh | None = None
        """Under ZeRO-1: the ranks that share the optimizer's work."""
        layers = cast(nn.ModuleList, model.get_submodule(self.family.layers))
        kept = {str(index): layers[index] for index in range(part.first, part.stop)}
        self._put(self.family.layers, nn.ModuleDict(kept))
        for path in self._paths():
            self._put(path, model.get_submodule(path))
        if self.embedding is not None:
            self._put(self.family.embedding, Embedding(cast(nn.Embedding, self.embedding)))
        if self.head is not None:
            self._put(self.family.head, Head(cast(nn.Linear, self.head)))
        self.tie()

    def _paths(self) -> Iterator[str]:
        """Paths of the modules outside the layers."""
        family = self.family
        if self.part.is_first:
            yield family.embedding
            if family.positions:
                yield family.positions
            if family.dropout:
                yield family.dropout
        if family.rotary:
            yield family.rotary
        if self.part.is_last:
            yield family.norm
            yield family.head

    def _put(self, path: str, module: nn.Module) -> None:
        *folders, name = path.split(".")
        place: nn.Module = self
        for folder in folders:
            if not hasattr(place, folder):
                place.add_module(folder, nn.Module())
            place = place.get_submodule(folder)
        place.add_module(name, module)

    @property
    def layers(self) -> nn.ModuleDict:
        """Keyed by the layer's index in the whole model."""
        return cast(nn.ModuleDict, self.get_submodule(self.family.layers))

    @property
    def embedding(self) -> nn.Module | None:
        return self.get_submodule(self.family.embedding) if self.part.is_first else None

    @property
    def head(self) -> nn.Module | None:
        return self.get_submodule(self.family.head) if self.part.is_last else None

    @property
    def tied(self) -> bool:
        """Head and embedding are one matrix in the model. They may be on different stages."""
        return bool(self.config.tie_word_embeddings)

    def tie(self) -> None:
        """Make head and embedding one parameter again, after sharding or moving replaced them."""
        if self.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def set_positions(self, positions_1T: torch.Tensor) -> None:
        """Set the positions of this rank's tokens in the sequence, [1, tokens]."""
        self.positions_1T = positions_1T

    def forward(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Takes token ids [batch, tokens] on the first stage, else hidden states. Returns hidden
        states; on the last stage the loss of `labels` [batch, tokens], or without labels the
        logits [batch, tokens, vocabulary]. Without `documents` a sequence is one document."""
        with self._casting(inputs.device):
            hidden = self._through_layers(inputs, documents)
            if not self.part.is_last:
                return hidden
            if self.autocast_dtype is not None:
                # The cast weights of the layers, which the loss would keep, are not used again.
                torch.clear_autocast_cache()
            head = self.get_submodule(self.family.head)
            return head(hidden) if labels is None else head(hidden, labels=labels, loss=self.loss)

    def _casting(self, device: torch.device) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast_dtype)

    def _through_layers(self, inputs: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        positions = self.positions_1T if documents is None else documents.positions_BT
        starts = None if documents is None else documents.starts_BS
        hidden = self._embed(inputs, positions) if self.part.is_first else inputs
        rotary = self.family.rotary
        # The rotary module uses only the device and the dtype of `hidden`.
        angles = (
            {"position_embeddings": self.get_submodule(rotary)(hidden, position_ids=positions)}
            if rotary
            else {}
        )
        for layer in self.layers.values():
            hidden = layer(hidden, attention_mask=starts, position_ids=positions, **angles)
        return self.get_submodule(self.family.norm)(hidden) if self.part.is_last else hidden

    def _embed(self, ids_BT: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.get_submodule(self.family.embedding)(ids_BT)
        if self.family.positions:
            hidden = hidden + self.get_submodule(self.family.positions)(positions)
        if self.family.dropout:
            hidden = self.get_submodule(self.family.dropout)(hidden)
        return hidden if self.autocast_dtype is None else hidden.to(self.autocast_dtype)

    def plain_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter under its name in the transformers model. A tied head has the name of the
        embedding, also on a stage without embedding. Adapters have PEFT's names.

        Quantised weights are excluded, because their elements cannot be written or sliced.
        """
        for name, parameter in self._all_parameters():
            if name not in self.quantised:
                yield name, parameter

    def quantised_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that `plain_parameters` excludes."""
        for name, parameter in self._all_parameters():
            if name in self.quantised:
                yield name, parameter

    def _all_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named_parameters():
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            if self.tied and name == f"{self.family.head}.weight":
                name = f"{self.family.embedding}.weight"
            yield name, parameter

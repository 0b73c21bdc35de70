"""The model as the trainer runs it: consecutive decoder layers, with what comes before and after.

A pipeline stage is a `Decoder` of some layers; without a pipeline one `Decoder` is the whole model.
Its parameters have the names that they have in the transformers model, so that checkpoints know
nothing of stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trainer.model.families import Family, family_of

WRAPPERS = ("_checkpoint_wrapped_module.", "base_layer.")
"""What activation checkpointing and adapters put into the names of the model's parameters."""


class NamedWeights(Protocol):
    """What can be filled with first weights, by name: a decoder, or some tensors of one."""

    config: PretrainedConfig

    def plain_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def is_adapter(name: str) -> bool:
    """Whether the parameter is part of an adapter and not of the model itself."""
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
        """Place in the whole sequence of each token that this rank sees; see `place`."""
        self.quantised: frozenset[str] = frozenset()
        """Plain names of the weights that are kept in 4 bits; see `model/quantize.py`."""
        layers = cast(nn.ModuleList, model.get_submodule(self.family.layers))
        kept = {str(index): layers[index] for index in range(part.first, part.stop)}
        self._put(self.family.layers, nn.ModuleDict(kept))
        for path in self._paths():
            self._put(path, model.get_submodule(path))
        self.tie()

    def _paths(self) -> Iterator[str]:
        """Of the modules around the layers."""
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
        """Keyed by their number in the whole model."""
        return cast(nn.ModuleDict, self.get_submodule(self.family.layers))

    @property
    def embedding(self) -> nn.Module | None:
        return self.get_submodule(self.family.embedding) if self.part.is_first else None

    @property
    def head(self) -> nn.Module | None:
        return self.get_submodule(self.family.head) if self.part.is_last else None

    @property
    def tied(self) -> bool:
        """Head and embedding are one matrix, be they on one stage or not."""
        return bool(self.config.tie_word_embeddings)

    def tie(self) -> None:
        """Make head and embedding one parameter again: cutting or moving them makes new ones."""
        if self.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def place(self, positions_1T: torch.Tensor) -> None:
        """Say which tokens of a sequence this rank sees, [1, tokens]."""
        self.positions_1T = positions_1T

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """From token ids [batch, tokens], or the hidden states of the stage before, to those of
        this stage, or logits [batch, tokens, vocabulary]."""
        positions = self.positions_1T
        hidden = self._embed(inputs) if self.part.is_first else inputs
        rotary = self.family.rotary
        # Of the hidden states it takes only their device and type.
        angles = (
            {"position_embeddings": self.get_submodule(rotary)(hidden, position_ids=positions)}
            if rotary
            else {}
        )
        for layer in self.layers.values():
            hidden = layer(hidden, attention_mask=None, position_ids=positions, **angles)
        if not self.part.is_last:
            return hidden
        return self.get_submodule(self.family.head)(self.get_submodule(self.family.norm)(hidden))

    def _embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.get_submodule(self.family.embedding)(ids_BT)
        if self.family.positions:
            hidden = hidden + self.get_submodule(self.family.positions)(self.positions_1T)
        if self.family.dropout:
            hidden = self.get_submodule(self.family.dropout)(hidden)
        return hidden

    def plain_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under its name in the transformers model; a tied head's is the
        embedding's, also where the stage has no embedding. Adapters have PEFT's names.

        Quantised weights are left out: no one may write to them or cut them element by element.
        """
        for name, parameter in self._all_parameters():
            if name not in self.quantised:
                yield name, parameter

    def quantised_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that `plain_parameters` leaves out."""
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

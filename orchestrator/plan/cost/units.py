"""The FSDP units of one rank: weights that are gathered, and gradients reduced, together."""

import math
from functools import lru_cache

from msgspec import Struct

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.plan.model.shape import ModelShape, layer_sizes
from orchestrator.plan.sizes import LARGE
from orchestrator.plan.stages import StageLayers


class Unit(Struct, frozen=True, kw_only=True):
    """Bytes of one unit after pp and tp splits."""

    gathered: float = 0.0
    reduced: float = 0.0


class Units(Struct, frozen=True, kw_only=True):
    layer: Unit
    layers: int
    embedding: Unit
    """Empty if it is on another rank or in the root."""
    head: Unit
    root: Unit
    """All that is in no other unit. It stays gathered from forward to backward."""
    again: int
    """Layers that the backward pass gathers again. The last unit stays gathered."""
    held: float
    """Parameters."""
    trained: float
    """Trained parameters."""
    gathered: float
    """Bytes of all units together."""
    reduced: float

    @property
    def outer(self) -> tuple[Unit, Unit, Unit]:
        return self.root, self.embedding, self.head

    @property
    def number(self) -> int:
        return self.layers + sum(unit.gathered > 0 for unit in self.outer)


@lru_cache(maxsize=4096)
def units_of(
    shape: ModelShape,
    tp: int,
    rank: StageLayers,
    sizes: tuple[float, int, int],
    lora: LoraSpec | None,
) -> Units:
    """`sizes` are the bytes per gathered weight of a layer, per other gathered weight, and per
    reduced gradient."""
    layer_size, size, reduce_size = sizes
    layer = _layer(shape, tp)
    layer_trained = layer if lora is None else adapters(shape, lora)
    vocabulary = math.ceil(shape.vocabulary_parameters / tp)
    embedding = (vocabulary + shape.input_parameters) * rank.is_first
    tied_here = shape.tied_embeddings and rank.is_first
    bias = math.ceil(shape.vocab_size / tp) * shape.head_bias
    head = (shape.norm_parameters + bias + (0 if tied_here else vocabulary)) * rank.is_last
    trains = lora is None

    def unit(parameters: float) -> Unit:
        return Unit(gathered=parameters * size, reduced=parameters * reduce_size * trains)

    own = shape.vocabulary_parameters >= LARGE and not shape.tied_embeddings
    held = rank.layers * layer + embedding + head
    trained = rank.layers * layer_trained + (embedding + head) * trains
    return Units(
        layer=Unit(gathered=layer * layer_size, reduced=layer_trained * reduce_size),
        layers=rank.layers,
        embedding=unit(embedding if own else 0),
        head=unit(head if own else 0),
        root=unit(0 if own else embedding + head),
        again=rank.layers - (0 if own and rank.is_last else 1),
        held=held,
        trained=trained,
        gathered=rank.layers * layer * layer_size + (embedding + head) * size,
        reduced=trained * reduce_size,
    )


def _layer(shape: ModelShape, tp: int) -> int:
    """Parameters of a layer on one tp rank. If only some layers have experts, the mean."""
    split, replicated = layer_sizes(shape)
    if shape.dense_layers:
        without, dense = len(shape.dense_layers) / shape.num_layers, layer_sizes(shape, dense=True)
        split -= round(without * (split - dense.split))
        replicated -= round(without * (replicated - dense.replicated))
    return math.ceil(split / tp) + replicated


def adapters(shape: ModelShape, lora: LoraSpec) -> int:
    """Parameters of a layer's LoRA matrices (Hu et al. 2021, section 4.1), before tp splits
    them."""
    sizes = (into + out for name, into, out in shape.linear if name in lora.target_modules)
    return lora.rank * sum(sizes)

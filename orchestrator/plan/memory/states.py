"""The model states of a rank: weights, gradients and optimizer state."""

import math
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import NamedTuple

from msgspec import Struct

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.plan.model.shape import (
    ModelShape,
    Tensor,
    layer_tensors,
    norm_tensors,
    split_dim,
)
from orchestrator.plan.setup import Setup
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES, LARGE, NF4_BYTES
from orchestrator.plan.stages import StageRank

MASTER_BYTES = FLOAT32_BYTES
"""Bytes of a master weight and of its gradient. They are float32 for any dtype."""
MOMENTS = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adafactor": 0, "sgd": 1}
"""Values per weight in the optimizer. Adafactor keeps only sums of rows and columns, which are few
(Shazeer and Stern 2018)."""
UPDATED_AT_ONCE = 2**24
"""Values whose moments exist in float32 too during an update of narrower ones
(`trainer/optimizer.py`)."""


class PerParameter(Struct, frozen=True, kw_only=True):
    """Bytes of the model states per parameter."""

    weights: int = 4
    gradients: int = 4
    master: int = 0
    """A float32 copy of narrower weights, which the optimizer updates."""
    optimizer: int = 8


class ModelStates(NamedTuple):
    """Bytes on one rank."""

    weights: int
    gradients: int
    master: int
    optimizer: int


def model_states(parameters: int, ranks: int, level: int, each: PerParameter) -> ModelStates:
    """The model states on one of `ranks` at a ZeRO level.

    Level 1 shards the optimizer state and the master weights, level 2 also the gradients, level 3
    also the weights (Rajbhandari et al. 2020, section 5, figure 1). Rounded up, as on the first
    ranks.
    """
    part = math.ceil(parameters / ranks)
    return ModelStates(
        weights=each.weights * (part if level >= 3 else parameters),
        gradients=each.gradients * (part if level >= 2 else parameters),
        master=each.master * (part if level >= 1 else parameters),
        optimizer=each.optimizer * (part if level >= 1 else parameters),
    )


class Piece(Struct, frozen=True):
    """One or several tensors on one rank."""

    whole: int
    """Elements after pp and tp splits, which FSDP gathers for use."""
    shard: int
    """Elements that the rank keeps. FSDP2 pads the rows to a multiple of the ranks."""

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(self.whole + other.whole, self.shard + other.shard)

    def times(self, count: int) -> "Piece":
        return Piece(self.whole * count, self.shard * count)


NOTHING = Piece(0, 0)


class Units(Struct, frozen=True, dict=True):
    """One rank's part of the model, by FSDP unit."""

    layer: Piece
    """One decoder layer; with experts, one that has them."""
    layers: int
    embedding: Piece
    """Empty if it is too small for a unit of its own; then it belongs to `root`."""
    head: Piece
    """Head and the norm before it; empty if the head is too small."""
    root: Piece
    """All the rest. It stays gathered during the whole step."""
    late_root: Piece
    """Part of the root that is used after the layers. Its gradient is computed first and reduced
    last."""
    dense: Piece = NOTHING
    """A decoder layer without experts, of a model that has experts in others."""
    dense_layers: int = 0

    @cached_property
    def all_layers(self) -> Piece:
        experts = self.layers - self.dense_layers
        return self.layer.times(experts) + self.dense.times(self.dense_layers)

    @cached_property
    def all(self) -> Piece:
        return self.all_layers + self.embedding + self.head + self.root


def units_of(setup: Setup, rank: StageRank) -> Units:
    """The units of a pipeline rank, split over tp and sharded as in `setup`."""
    mesh = setup.mesh
    return _units(setup.shape, mesh.tp, shard_count(setup), rank, mesh.pp == 1)


def shard_count(setup: Setup) -> int:
    """Number of ranks that shard the weights or, under ZeRO-1, the moments."""
    mesh = setup.mesh
    return mesh.cp * (mesh.dp_shard if setup.data == "fsdp" else mesh.dp_replicate)


@cache
def _units(shape: ModelShape, tp: int, sharing: int, rank: StageRank, whole_model: bool) -> Units:
    def piece(tensors: Iterable[Tensor]) -> Piece:
        return _piece(_cut(tensors, tp), sharing)

    vocabulary: Tensor = (shape.vocab_size, shape.hidden_size, 0)
    large = shape.vocabulary_parameters >= LARGE and not shape.tied_embeddings
    norm = piece(norm_tensors(shape))
    before = piece([vocabulary]) if rank.is_first else NOTHING
    # In a pipeline the last stage has a copy of a tied embedding.
    copied = rank.is_last and not (shape.tied_embeddings and whole_model)
    after = piece([vocabulary]) if copied else NOTHING
    if rank.is_last and shape.head_bias:
        after += piece([(shape.vocab_size, 1, 0)])
    positions = piece([(shape.positions, shape.hidden_size, None)])
    root = positions + norm.times(shape.embedding_norm) if rank.is_first else NOTHING
    late = NOTHING
    if rank.is_last and not large:
        tied_here = piece([vocabulary]) if not copied else NOTHING
        late, root = norm + after + tied_here, root + norm + after
    return Units(
        layer=_piece(_layer(shape, tp), sharing),
        dense=_piece(_layer(shape, tp, dense=True), sharing) if rank.dense_layers else NOTHING,
        dense_layers=rank.dense_layers,
        layers=rank.layers,
        embedding=before if large else NOTHING,
        head=norm + after if large and rank.is_last else NOTHING,
        root=root if large else root + before,
        late_root=late,
    )


def _cut(tensors: Iterable[Tensor], tp: int) -> list[tuple[int, int]]:
    """Rows and columns of each tensor on one tp rank."""
    return [
        (-(-rows // tp) if cut == 0 else rows, -(-columns // tp) if cut == 1 else columns)
        for rows, columns, cut in tensors
    ]


@cache
def _layer(shape: ModelShape, tp: int, *, dense: bool = False) -> Sequence[tuple[int, int]]:
    # The trainer cannot split GPT-2's fused projection, so it refuses tp.
    return _cut(layer_tensors(shape, dense=dense), 1 if shape.fused else tp)


def _piece(sides: Iterable[tuple[int, int]], sharing: int) -> Piece:
    """The sum of tensors with these rows and columns, sharded by rows."""
    whole = shard = 0
    for rows, columns in sides:
        whole += rows * columns
        shard += -(-rows // sharing) * columns
    return Piece(whole, shard)


class States(Struct, frozen=True):
    """Bytes of the model states on a device."""

    parameters: int
    gradients: int
    """At the optimizer step."""
    optimizer: int
    trained: Piece
    """The trained parameters: all, or the adapters."""
    host: dict[str, int]
    """With CPU offload, the states in host memory; those above are then 0."""


def states_of(setup: Setup, rank: StageRank, units: Units) -> States:
    every, sharded = units.all, setup.data == "fsdp"
    trained = every if setup.lora is None else adapters(setup, rank)
    moments = COMPUTE_BYTES[setup.state_dtype] * MOMENTS[setup.optimizer]
    parameters = MASTER_BYTES * (trained.shard if sharded else trained.whole)
    if setup.lora is not None:
        parameters += frozen_bytes(setup, units)
    zero1 = setup.data != "ddp"
    gradients = MASTER_BYTES * (trained.shard if zero1 else trained.whole)
    optimizer = moments * (trained.shard if zero1 else trained.whole)
    if not (sharded and setup.cpu_offload):
        return States(parameters, gradients, optimizer, trained, {})
    host = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return States(0, 0, 0, trained, host)


def update_bytes(setup: Setup, states: States) -> int:
    """Bytes of temporary values on the device during the optimizer step."""
    if setup.state_dtype == "float32" or states.host:
        return 0
    own = states.trained.whole if setup.data == "ddp" else states.trained.shard
    return min(UPDATED_AT_ONCE, own) * FLOAT32_BYTES * MOMENTS[setup.optimizer]


def adapters(setup: Setup, rank: StageRank) -> Piece:
    """LoRA's two matrices per target module (Hu et al. 2021, section 4.1)."""
    assert setup.lora is not None
    one = _adapters(setup.shape, setup.lora, setup.mesh.tp, shard_count(setup))
    return one.times(rank.layers)


@cache
def _adapters(shape: ModelShape, lora: LoraSpec, tp: int, sharing: int) -> Piece:
    """Of one layer."""
    tensors: list[Tensor] = []
    for name, inputs, outputs in shape.linear:
        if name not in lora.target_modules:
            continue
        # tp splits the outputs of B like those of the linear layer, or the inputs of A like its.
        cut = split_dim(name)
        tensors += [
            (lora.rank, inputs, 1 if cut == 1 else None),
            (outputs, lora.rank, 0 if cut == 0 else None),
        ]
    return _piece(_cut(tensors, tp), sharing)


def gathered_layer(setup: Setup, units: Units) -> float:
    """Bytes of a layer's gathered weights: in the compute type, or in 4 bits with NF4."""
    size = COMPUTE_BYTES[setup.dtype]
    if not is_nf4(setup):
        return units.layer.whole * size
    matrices = setup.shape.layer_matrices // setup.mesh.tp
    return (units.layer.whole - matrices) * size + matrices * NF4_BYTES


def is_nf4(setup: Setup) -> bool:
    return setup.lora is not None and setup.lora.quantize == "nf4"


def frozen_bytes(setup: Setup, units: Units) -> int:
    """Bytes of the frozen weights under LoRA. With NF4, the layers' matrices have 4 bits."""
    assert setup.lora is not None
    every, sharded = units.all, setup.data == "fsdp"
    kept = every.shard if sharded else every.whole
    if not is_nf4(setup):
        return kept * MASTER_BYTES
    matrices = units.layers * (setup.shape.layer_matrices // setup.mesh.tp)
    matrices = math.ceil(matrices / (shard_count(setup) if sharded else 1))
    return math.ceil((kept - matrices) * MASTER_BYTES + matrices * NF4_BYTES)

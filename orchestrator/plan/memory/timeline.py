"""Memory of a rank at the points of a step where it may peak.

Between two of these points memory grows or shrinks monotonically, layer by layer, so the peak is at
one of them. Order and lifetimes follow torch 2.13's FSDP2 (`_fully_shard/_fsdp_param_group.py`) and
the trainer's buckets, as traced by `python -m benchmarks.memory`.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from orchestrator.contract.spec.train_spec import STORES_ALL, chunks_of_loss
from orchestrator.plan.memory.activations import Layer, LayerUsage, layer_of
from orchestrator.plan.memory.states import (
    MASTER_BYTES,
    NOTHING,
    Piece,
    States,
    Units,
    gathered_layer,
    is_nf4,
    shard_count,
)
from orchestrator.plan.setup import Setup, every
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES
from orchestrator.plan.stages import StageRank


class Usage(NamedTuple):
    """Bytes at one point of a step, without the states that are kept from step to step."""

    gradients: float = 0
    gathered: float = 0
    """Gathered weights of whole FSDP units, in the compute type."""
    activations: float = 0
    """Kept activations, and temporary values of the layer in its backward pass."""
    logits: float = 0
    temporary: float = 0
    """Unsharded gradients of whole units, and reduction buffers."""
    correction: float = 0
    """Zero or negative, because two items may peak at different times inside one layer."""


When = Literal["forward", "loss", "backward", "end"]
"""A phase of the pass of a micro batch. At its end the gradient of the embedding is computed."""


class Point(NamedTuple):
    when: When
    done: int
    """Layers whose backward pass is done."""
    usage: Usage


class _LayerBackward(NamedTuple):
    """Peak bytes of each item during one layer's backward pass."""

    activations: float
    weights: float
    """Gradients of the layer's weights."""
    correction: float
    """As in `Usage`."""


def _layer_backward(
    usages: tuple[LayerUsage, ...], tokens: int, weight_bytes: int
) -> _LayerBackward:
    """The peaks without activations of other micro batches; `weight_bytes` is the size of a
    gradient element."""
    most = weights = both = 0.0
    for per_token, elements in usages:
        activations, gradients = per_token * tokens, elements * weight_bytes
        most, weights = max(most, activations), max(weights, gradients)
        both = max(both, activations + gradients)
    return _LayerBackward(most, weights, both - most - weights)


class _Rank(NamedTuple):
    """The inputs of the usages of one rank."""

    setup: Setup
    units: Units
    layer: Layer
    kept: float
    """Micro batches whose activations are kept at once."""
    tokens: int
    """Tokens of a micro batch on this rank."""
    size: int
    """Bytes of a value in the compute type."""
    has_loss: bool
    split: tuple[int, ...]
    """As in `StageRank`."""
    weight_bytes: int
    """Bytes of a gradient element when it is computed."""
    accumulates: bool
    """Whole gradients of several micro batches are summed before they are reduced."""

    layer_peak: _LayerBackward
    """Of each layer, except those that `every_k` does not recompute."""

    @property
    def stages(self) -> int:
        return self.setup.pipeline.stages if self.setup.mesh.pp > 1 else 1

    @property
    def incoming(self) -> float:
        """A hidden state between layers."""
        return self.setup.shape.hidden_size * self.size * self.tokens / self.setup.mesh.tp

    @property
    def others(self) -> float:
        """Activations of micro batches that wait for their backward pass."""
        return (self.kept - 1) * self.below(self.units.layers) if self.kept != 1 else 0

    @property
    def left(self) -> float:
        """Activations after the backward pass of a stage, if this many were stored before it."""
        return (self.kept - 1 / self.stages) * self.below(self.units.layers)

    def below(self, layers: float) -> float:
        """Activations of one micro batch in the lowest `layers`."""
        setup = self.setup
        if setup.checkpointing != "every_k":
            return layers * self.layer.kept * self.tokens
        plain = self.plain(layers)
        return (plain * self.layer.whole + (layers - plain) * self.layer.kept) * self.tokens

    def plain(self, layers: float) -> float:
        """How many of the lowest `layers` keep all activations (no recomputation)."""
        kind = self.setup.checkpointing
        if kind == "every_k":
            return layers - layers // every(self.setup)
        return layers if kind in STORES_ALL else 0

    @property
    def loss(self) -> Usage:
        """Usage during the last chunk of the loss, which also computes the gradients of the head
        (`trainer/model/chunked_loss.py`)."""
        if not self.has_loss:
            return Usage()
        setup, shape = self.setup, self.setup.shape
        tp, hidden = setup.mesh.tp, shape.hidden_size
        vocabulary = math.ceil(shape.vocab_size / tp)
        chunk = math.ceil(self.tokens / chunks_of_loss(setup.loss_chunks, self.tokens))
        # Logits and their gradients are float32, and for a moment also in a narrower type.
        narrow = min(self.size, COMPUTE_BYTES[setup.output_dtype or setup.dtype])
        logits = chunk * vocabulary * (FLOAT32_BYTES + (narrow if narrow < FLOAT32_BYTES else 0))
        kept = self.kept * self.below(self.units.layers)
        head = hidden * vocabulary if setup.lora is None else 0
        if self.weight_bytes > self.size:
            # Under autocast the product of a chunk is added to a wider sum.
            logits = max(logits, (chunk * vocabulary + head) * self.size)
        return Usage(
            activations=kept
            + self.layer.last_norm * self.tokens
            + hidden * self.tokens * self.size,
            logits=logits,
            temporary=head * self.weight_bytes,
        )

    def layer_back(self, done: int) -> "_LayerBackward":
        """Peaks in the backward pass of the next layer, after `done` layers."""
        waiting = self.others + self.below(self.units.layers - 1 - done)
        peak = self.layer_peak
        if self.setup.checkpointing == "every_k" and self._is_plain(done):
            peak = _layer_backward(self.layer.plain_usages, self.tokens, self.weight_bytes)
        return _LayerBackward(waiting + peak.activations, peak.weights, peak.correction)

    def dequantising(self, done: int | None) -> float:
        """Activations while the largest 4-bit weight of a layer is dequantised: in the last layer's
        forward pass (None), or in the backward pass of the next layer after `done` layers."""
        shape, layers = self.setup.shape, self.units.layers
        width = shape.intermediate_size / self.setup.mesh.tp + 2 * shape.hidden_size
        working = width * self.size * self.tokens
        if done is None:
            return self.kept * self.below(layers) + working
        stored = max(self.layer.whole, self.layer.recomputed) * self.tokens
        return self.others + self.below(layers - 1 - done) + stored + working

    def _is_plain(self, done: int) -> bool:
        return (self.units.layers - done) % every(self.setup) != 0

    @property
    def peak_candidates(self) -> list[int]:
        """The layers whose backward pass may be the peak, as the number of layers done before them:
        the last two layers and the first two; with `every_k` also the last recomputed one."""
        last = self.units.layers - 1
        if self.setup.checkpointing == "every_k":
            return sorted({0, min(1, last), last, min(last, (last + 1) % every(self.setup))})
        # With accumulation the layers between the ends need no more than the first.
        return [0, last] if self.accumulates else sorted({0, min(1, last), max(0, last - 1), last})


def dequantised(setup: Setup) -> float:
    """Bytes while torchao's `NF4Tensor.get_original_weight` computes the largest weight: indices of
    64 bits, looked up and scaled values, and the result."""
    largest = max(inputs * outputs for _, inputs, outputs in setup.shape.linear)
    return largest / setup.mesh.tp * (8 + 4 * FLOAT32_BYTES / 2 + FLOAT32_BYTES)


def points_of(setup: Setup, rank: StageRank, units: Units, states: States) -> list[Point]:
    """All points of a step at which `rank` may peak."""
    mesh = setup.mesh
    alone = shard_count(setup) * mesh.dp_replicate == 1
    # The trainer does not apply FSDP then.
    plain = alone and setup.dtype == "float32" and not setup.cpu_offload
    sharded, size = setup.data == "fsdp" and not plain, COMPUTE_BYTES[setup.dtype]
    tokens = setup.micro_batch_size * math.ceil(setup.tokens / mesh.cp)
    layer, weight_bytes = layer_of(setup), size if sharded else MASTER_BYTES
    one = _Rank(
        setup,
        units,
        layer,
        rank.kept,
        tokens,
        size,
        rank.is_last,
        rank.split,
        weight_bytes,
        setup.micro_batches > 1 and not setup.reduces_each,
        _layer_backward(layer.usages, tokens, weight_bytes),
    )
    return list(_sharded(one, states) if sharded else _replicated(one, states))


class _Gathered(NamedTuple):
    """Bytes of gathered weights, in the compute type or in 4 bits."""

    layer: float
    head: float
    root: float
    embedding: float
    everything: float
    ahead: int
    """Layers that are gathered before they are needed, in the backward pass."""
    parts: float
    """What stays of each layer after the forward pass, if it is resharded over few ranks."""
    stays: bool
    """All weights stay gathered after the forward pass."""

    @classmethod
    def of(cls, rank: _Rank) -> "_Gathered":
        setup, units, size = rank.setup, rank.units, rank.size
        layer = gathered_layer(setup, units)
        head, root, embedding = units.head, units.root, units.embedding
        return cls(
            layer=layer,
            head=head.whole * size,
            root=root.whole * size,
            embedding=embedding.whole * size,
            everything=layer * (units.layers - units.dense_layers)
            + (units.dense.times(units.dense_layers) + head + root + embedding).whole * size,
            ahead=min(setup.backward_prefetch, units.layers - 1) if shard_count(setup) > 1 else 0,
            parts=0.0 if isinstance(setup.reshard, bool) else layer / setup.reshard,
            stays=setup.reshard is False or (setup.mesh.pp > 1 and setup.pipeline.stages > 1),
        )


def _sharded(rank: _Rank, states: States) -> Iterator[Point]:
    """FSDP2: units are gathered for use, and their gradients reduced afterwards."""
    setup = rank.setup
    grads, weights = _Gradients.of(rank, states), _Gathered.of(rank)
    # A split backward pass computes the weights' gradients when FSDP has looked for them. They stay
    # in the compute type until the next micro batch.
    unsummed = weights.layer * sum(rank.split) + weights.head * bool(rank.split)
    if rank.has_loss:
        yield from _forward_end(rank, grads, weights, unsummed)
    # A pipeline stage stays gathered after each backward pass but the last.
    frees = not rank.accumulates and not (setup.mesh.pp > 1 and setup.reduces_each)
    if rank.split:
        yield from _split_backward(rank, grads, weights, unsummed)
    else:
        yield from _layers_backward(rank, grads, weights, frees)
    if is_nf4(setup):
        ahead = min(setup.forward_prefetch, 1)
        gathered = weights.root + weights.layer + weights.head * ahead
        gathered = weights.everything if weights.stays else gathered
        yield Point(
            "forward",
            0,
            Usage(grads.before, gathered, rank.dequantising(None), 0, dequantised(setup)),
        )
    if setup.mesh.pp > 1 and weights.embedding and not weights.stays:
        # Only the embedding is gathered again: into a buffer, and from there into its place.
        gathered = weights.everything + weights.embedding
        yield Point(
            "end", rank.units.layers, Usage(grads.before, gathered, rank.left + rank.incoming)
        )
    left = weights.stays or setup.mesh.pp > 1
    ends = _ends(rank, grads, weights.everything if left and not frees else weights.root)
    yield Point("end", rank.units.layers, ends)


def _forward_end(
    rank: _Rank, grads: "_Gradients", weights: _Gathered, unsummed: float
) -> Iterator[Point]:
    """Head and loss, and the reduction of the head's gradient."""
    loss, head, layer = rank.loss, weights.head, weights.layer
    # The first unit of the backward pass is not freed: the head, or a layer if the head is in the
    # root.
    kept = weights.root + (head or layer) + weights.parts * rank.units.layers
    kept = weights.everything if weights.stays else kept
    if not weights.stays:
        # The head is copied from the buffer of the collective.
        forward = rank.kept * rank.below(rank.units.layers) + rank.incoming
        yield Point("forward", 0, Usage(grads.before, kept + head, forward))
    yield Point(
        "loss",
        0,
        Usage(
            gradients=grads.before,
            gathered=kept,
            activations=loss.activations,
            logits=loss.logits,
            temporary=unsummed + loss.temporary,
        ),
    )
    if head and not rank.accumulates:
        # Its weights are freed by then.
        gathered = kept - head + (0 if weights.stays else weights.ahead * layer)
        yield Point(
            "loss",
            0,
            Usage(
                gradients=grads.before,
                gathered=gathered,
                activations=rank.others + rank.below(rank.units.layers) + rank.incoming,
                temporary=_reduced(rank.setup, grads.head, is_matrix=True),
            ),
        )


def _layers_backward(
    rank: _Rank, grads: "_Gradients", weights: _Gathered, frees: bool
) -> Iterator[Point]:
    setup, layer = rank.setup, weights.layer
    reduce = COMPUTE_BYTES[setup.reduce_dtype]
    for done in rank.peak_candidates:
        left = rank.units.layers - done - 1
        gathered = weights.root + layer * (1 + weights.ahead) + weights.parts * left
        if not left:
            gathered = weights.root + layer + (weights.embedding if weights.ahead else 0)
        if weights.stays:
            gathered = weights.everything - (weights.head + layer * done) * frees
        if not left and setup.mesh.pp > 1:
            # A pipeline schedule keeps its stages gathered between two backward passes.
            gathered = weights.everything
        in_flight = (grads.layer if done else grads.head).whole * reduce * (not rank.accumulates)
        reduced, peak = grads.after(done), rank.layer_back(done)
        temporary = grads.early + in_flight + peak.weights
        yield Point(
            "backward",
            done,
            Usage(reduced, gathered, peak.activations, 0, temporary, peak.correction),
        )
        if is_nf4(setup):
            yield Point(
                "backward",
                done,
                Usage(reduced, gathered, rank.dequantising(done), 0, dequantised(setup)),
            )


def _split_backward(
    rank: _Rank, grads: "_Gradients", weights: _Gathered, unsummed: float
) -> Iterator[Point]:
    """The first of two backward passes through the largest stage: in its first and its last layer.
    Nothing is freed until the second pass, and each layer's earlier gradients are summed when it is
    done."""
    alive = rank.kept * rank.below(rank.units.layers)
    for done in {1, max(rank.split, default=1)}:
        stored = done * (rank.layer.outputs + rank.layer.recomputed) + rank.layer.widest
        yield Point(
            "backward",
            done,
            Usage(
                gradients=grads.before,
                gathered=weights.everything,
                activations=alive + stored * rank.tokens,
                temporary=unsummed - (done - 1) * weights.layer,
            ),
        )


def _ends(rank: _Rank, grads: "_Gradients", gathered: float) -> Usage:
    """The last unit of the backward pass, which has the embedding. Its weights are freed by then,
    unless all weights stay gathered."""
    setup, size = rank.setup, rank.size
    has_embedding = rank.units.embedding.whole > 0
    unit = grads.embedding if has_embedding else grads.root
    return Usage(
        gradients=grads.after(rank.units.layers),
        gathered=gathered if has_embedding else 0,
        activations=rank.left,
        temporary=unit.whole * size if rank.accumulates else _reduced(setup, unit, has_embedding),
    )


def _reduced(setup: Setup, unit: Piece, is_matrix: bool) -> int:
    """Bytes while a unit's gradient is reduced: the reduce-scatter buffer plus the larger of the
    computed gradient (before) and the result (after), which is also cast to float32 if needed.

    With more than one rank, torch's `foreach_reduce` holds a unit's last gradient until it returns.
    In a unit with a single matrix, that is the whole gradient.
    """
    size, reduce = COMPUTE_BYTES[setup.dtype], COMPUTE_BYTES[setup.reduce_dtype]
    outcome = unit.shard * (reduce + (0 if reduce == MASTER_BYTES else MASTER_BYTES))
    if is_matrix and shard_count(setup) > 1:
        return unit.whole * (reduce + size) + outcome
    return unit.whole * reduce + max(unit.whole * size, outcome)


class _Gradients(NamedTuple):
    """Gradients of trained parameters, by unit."""

    layer: Piece
    head: Piece
    embedding: Piece
    root: Piece
    each: int
    """Bytes per element of a shard on the device; 0 with CPU offload."""
    before: float
    """Bytes of gradients from earlier micro batches: shards, or whole gradients if they are reduced
    in the last backward pass only (`FSDPModule.set_requires_gradient_sync`)."""
    early: float
    """Bytes of the root's gradients that are computed first and reduced last."""

    @classmethod
    def of(cls, rank: _Rank, states: States) -> "_Gradients":
        setup, units = rank.setup, rank.units
        each = 0 if setup.cpu_offload else MASTER_BYTES
        before = states.trained.whole * COMPUTE_BYTES[setup.reduce_dtype] * rank.accumulates
        if setup.reduces_each:
            before = states.trained.shard * each
        if setup.lora is None:
            early = units.late_root.whole * rank.size
            return cls(units.layer, units.head, units.embedding, units.root, each, before, early)
        layers = max(1, units.layers)
        layer = Piece(states.trained.whole // layers, states.trained.shard // layers)
        return cls(layer, NOTHING, NOTHING, NOTHING, each, before, 0)

    def after(self, done: int) -> float:
        """Bytes of gradients after the backward pass of `done` layers."""
        if self.before:
            return self.before
        return (self.head.shard + self.layer.shard * done) * self.each


def _replicated(rank: _Rank, states: States) -> Iterator[Point]:
    """Without FSDP: gradients stay. Under DDP and ZeRO-1 the buffer of a bucket replaces its
    gradients, and lives until the last bucket is done."""
    setup, units, size = rank.setup, rank.units, rank.size
    whole = states.trained.whole * MASTER_BYTES
    per_layer = states.trained.whole // max(1, units.layers) if setup.lora else units.layer.whole
    # Autocast keeps cast copies of the matrices: all until the end of the forward pass, and those
    # of layers without recomputation until the backward pass. Each micro batch has its own.
    cast = 0 if size == MASTER_BYTES else size
    casts = cast * (rank.kept - 1) * rank.plain(units.layers) * units.layer.whole
    ends = units.head.whole + units.late_root.whole
    first = 0 if setup.lora else ends
    more = _bucket_bytes(setup, states) - MASTER_BYTES
    if rank.has_loss:
        loss, all_layers = rank.loss, units.all_layers.whole
        summed = whole if rank.accumulates else 0
        yield Point("forward", 0, Usage(summed, casts + cast * all_layers, loss.activations))
        if is_nf4(setup):
            yield Point(
                "forward", 0, Usage(summed, 0, rank.dequantising(None), 0, dequantised(setup))
            )
        plain = rank.plain(units.layers) * units.layer.whole
        gathered = casts + cast * (plain + ends)
        yield Point(
            "loss", 0, Usage(summed, gathered, loss.activations, loss.logits, loss.temporary)
        )
    for done in rank.peak_candidates:
        computed = per_layer * done + first
        # A tied head's gradient waits for that of the embedding. A pipeline averages at its end.
        waits = first if setup.shape.tied_embeddings and setup.mesh.pp == 1 else 0
        in_buckets = computed - waits if setup.mesh.pp == 1 else 0
        left = units.layers - 1 - done
        peak = rank.layer_back(done)
        gradients = whole if rank.accumulates else computed * MASTER_BYTES + peak.weights
        yield Point(
            "backward",
            done,
            Usage(
                gradients=gradients + in_buckets * more,
                gathered=casts + cast * units.layer.whole * (rank.plain(left) + 1),
                activations=peak.activations,
                # With accumulation, the gradient of each weight is temporary.
                correction=0 if rank.accumulates else peak.correction,
            ),
        )
        if is_nf4(setup):
            yield Point(
                "backward", done, Usage(whole, 0, rank.dequantising(done), 0, dequantised(setup))
            )
    # The gradient of the embedding comes last. It is added to that of former micro batches, and a
    # buffer with padded rows is a copy of it.
    copies = rank.accumulates + _is_padded(setup, states)
    last = 0 if setup.lora else units.embedding.whole
    # Its average is also the last one that becomes float32.
    narrow = COMPUTE_BYTES[setup.reduce_dtype] if more < 0 and setup.data == "ddp" else 0
    yield Point(
        "end",
        units.layers,
        Usage(
            # Averages in another type become float32 gradients one bucket after the other.
            gradients=whole + max(0, states.trained.whole * more),
            gathered=casts,
            activations=rank.others + rank.incoming,
            temporary=last * max(MASTER_BYTES * copies, narrow),
        ),
    )


def _is_padded(setup: Setup, states: States) -> bool:
    """The rows that ZeRO-1 reduce-scatters do not divide by the ranks."""
    is_even = states.trained.shard * shard_count(setup) == states.trained.whole
    return setup.data == "zero1" and not is_even


def _bucket_bytes(setup: Setup, states: States) -> float:
    """Bytes per gradient element of a bucket that is being reduced. ZeRO-1 has the padded input of
    the reduce-scatter, and this rank's rows of the result."""
    ranks = shard_count(setup)
    if ranks == 1:
        return MASTER_BYTES
    rows = 1.0
    if setup.data == "zero1":
        rows = states.trained.shard * (ranks + 1) / states.trained.whole
    return COMPUTE_BYTES[setup.reduce_dtype] * rows

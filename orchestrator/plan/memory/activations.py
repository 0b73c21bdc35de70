"""The activations of a decoder layer, in bytes per token.

They are counted tensor by tensor, as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1),
for the operations of transformers' models and an attention kernel without a score matrix
(FlashAttention, Dao et al. 2022). `tests/plan/memory/test_traced.py` compares them with the
trainer's allocations.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from msgspec import Struct

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.train_spec import (
    BY_OPERATION,
    STORES_ALL,
    Checkpointing,
    stored_products,
)
from orchestrator.plan.model.shape import ModelShape, layer_sizes
from orchestrator.plan.setup import Setup
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES


class LayerUsage(NamedTuple):
    """Memory at one point of a layer's backward pass."""

    tokens: float
    """Bytes per token: activations that are still stored, and temporary values."""
    weights: int
    """Elements of weight gradients of this layer that exist on this rank."""


class Layer(Struct, frozen=True):
    """Bytes per token of a rank's part of the sequence."""

    whole: float
    """Stored from forward to backward without checkpointing."""
    recomputed: float
    """What recomputation stores until the layer's backward pass is done."""
    kept: float
    """Stored with checkpointing, the layer's input included."""
    usages: tuple[LayerUsage, ...]
    """Points of the backward pass, with recomputed activations."""
    plain_usages: tuple[LayerUsage, ...]
    """The same without checkpointing."""
    last_norm: float
    """Stored by the norm after the last layer, and the input of the head."""
    outputs: float
    """Gradients of the results of all weights, which a split backward pass stores until it computes
    the gradients of the weights."""
    widest: float
    """Temporary values of a backward pass that frees nothing."""


def layer_of(setup: Setup) -> Layer:
    kind: Checkpointing = "full" if setup.checkpointing == "every_k" else setup.checkpointing
    ulysses = setup.mesh.cp > 1 and setup.context == "ulysses"
    size = COMPUTE_BYTES[setup.dtype]
    return _layer(setup.shape, setup.mesh.tp, size, ulysses, kind, setup.lora)


@cache
def _layer(
    shape: ModelShape,
    tp: int,
    size: int,
    ulysses: bool,
    kind: Checkpointing,
    lora: LoraSpec | None,
) -> Layer:
    parts = _Parts.of(shape, tp, size, ulysses, lora, regathers=kind == "gathers")
    plain = _usages(shape, tp, size, parts, lora)
    hidden = shape.hidden_size * size / tp
    kept = parts.whole if kind in STORES_ALL else hidden
    # The stored input is there besides what the first norm stores, its cast copy.
    twice = 0.0 if kind in STORES_ALL else hidden
    if kind in BY_OPERATION:
        kept += _by_operation(shape, tp, size, ulysses, kind, lora)
        twice += _unneeded(shape, tp, size, lora)
    return Layer(
        whole=parts.whole,
        recomputed=0.0 if kind in STORES_ALL else parts.whole,
        kept=kept,
        usages=tuple(LayerUsage(m.tokens + twice, m.weights) for m in plain),
        plain_usages=plain,
        last_norm=_norm(shape, tp, size, lora is None) + (0 if lora else shape.hidden_size * size),
        outputs=_outputs(shape, tp, size),
        widest=max(plain[0].tokens - parts.whole, plain[2].tokens),
    )


def _outputs(shape: ModelShape, tp: int, size: int) -> float:
    """Bytes of the gradients at the results of a layer's matrices and norms."""
    split = shape.query_size + shape.key_size + shape.value_size + _inner(shape, shape.up_size)
    split += shape.hidden_size * shape.layer_norms + shape.result_size * shape.attention_gate
    whole = 2 * shape.hidden_size + 2 * shape.latent_size
    return (split / tp + whole) * size


def _inner(shape: ModelShape, each: int) -> float:
    """`each` feature of an MLP or of one expert, for all experts of a token; the mean of layers
    with and without experts."""
    if not shape.num_experts:
        return each
    width = each / shape.intermediate_size
    met = shape.experts_per_token * shape.intermediate_size + shape.shared_size
    dense = len(shape.dense_layers) / shape.num_layers
    return width * ((1 - dense) * met + dense * shape.dense_intermediate_size)


class _Parts(Struct, frozen=True):
    """Bytes per token that a layer stores without checkpointing."""

    attention: float
    """Including the norm before it."""
    mlp_norm: float
    mlp: float
    regathers: bool
    """Gathered inputs are gathered again in the backward pass, not stored."""

    @property
    def whole(self) -> float:
        return self.attention + self.mlp_norm + self.mlp

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        tp: int,
        size: int,
        ulysses: bool,
        lora: LoraSpec | None,
        *,
        regathers: bool,
    ) -> "_Parts":
        """The matrix products store the gathered outputs of the norms, or with `regathers` this
        rank's part of them. With LoRA only the adapters store their inputs, because a frozen matrix
        has no weight gradient."""
        targets = None if lora is None else set(lora.target_modules)
        query, keys, results = shape.query_size, shape.key_size, shape.result_size
        attention = query + keys + shape.value_size + results + query * ulysses
        attention = attention * size + shape.num_heads * FLOAT32_BYTES
        if shape.has_qk_norms:
            attention += (query + keys) * _of_qk_norm(shape, size)
        normed = shape.has_qk_norms and shape.has_layer_norms
        if shape.rotary_size and shape.one_projection and not normed:
            # Values are a view of the projection, so queries and keys stay too.
            attention += (query + keys) * size
        if shape.rotary_size and shape.partial_rotary:
            # Joined parts have another layout, so results of heads are copied.
            attention += results * size
        if shape.attention_gate:
            attention += 2 * results * size
        if shape.sub_norms:
            attention += results * (FLOAT32_BYTES + 2 * size)
        latent = 0
        if shape.latent:
            # Values are a view of what they are computed with: keys without rotary embeddings.
            # Results of heads are copied next to each other.
            attention += (keys - shape.num_heads * shape.latent.rope_dim + results) * size
            latent = shape.latent_size * (FLOAT32_BYTES + 2 * size)
        into = shape.hidden_size * size / (tp if regathers else 1)
        norm = _norm(shape, tp, size, trained=lora is None)
        further = (shape.layer_norms - 2) / 2 * norm
        # The matrices share one stored input.
        attends = _trains(
            shape,
            targets,
            "q_proj",
            "k_proj",
            "v_proj",
            "c_attn",
            "q_a_proj",
            "kv_a_proj_with_mqa",
            "attention_gate",
        )
        widens = _trains(shape, targets, "gate_proj", "up_proj", "c_fc")
        # The router stores the input of the experts, or a copy of it in float32.
        widens |= lora is None and shape.num_experts > 0 and not shape.router_in_float32
        # Attention and MLP have the same input.
        shares = shape.layer_norms == 1
        # Two layer norms of the same input store it once.
        twice = shape.same_input and shape.layer_norms == 2 and shape.has_layer_norms
        second = 0.0 if twice else norm
        return cls(
            attention=norm + into * attends + further + latent + attention / tp,
            mlp_norm=second + into * (widens and not shares) + further,
            mlp=_mlp(shape, size, targets) / tp,
            regathers=regathers,
        )


def _of_qk_norm(shape: ModelShape, size: int) -> int:
    """Bytes that a norm of queries or keys stores per feature. See `_norm`."""
    if shape.has_layer_norms:
        return size
    scaled = FLOAT32_BYTES if shape.norms_in_float32 else size
    return FLOAT32_BYTES + scaled * shape.norm_scale


def _trains(shape: ModelShape, targets: set[str] | None, *names: str) -> bool:
    """Whether one of the layer's matrices with these names is trained or has an adapter."""
    existing = {name for name, _, _ in shape.linear}.intersection(names)
    return bool(existing if targets is None else existing & targets)


def _norm(shape: ModelShape, tp: int, size: int, trained: bool = True) -> float:
    """Bytes that one norm stores. Sequence parallelism splits its tokens over tp.

    transformers computes RMS norms in float32 and stores the float32 input and, for the gradient of
    the scale, the normalised value. A layer norm stores its input.
    """
    if shape.has_layer_norms:
        return shape.hidden_size * size / tp
    scaled = FLOAT32_BYTES if shape.norms_in_float32 else size
    values = FLOAT32_BYTES * (1 + shape.norms_subtract_mean)
    return shape.hidden_size * (values + scaled * (trained and shape.norm_scale)) / tp


def _mlp(shape: ModelShape, size: int, targets: set[str] | None) -> float:
    """Bytes that the MLP stores, before tp splits them.

    With experts: its values for each expert of a token, copies of the expert's input and output,
    and the scores of all experts.
    """
    frozen = targets is not None and "down_proj" not in targets
    values = (shape.mlp_values - (shape.gated and frozen)) * size
    if shape.sub_norms:
        values += FLOAT32_BYTES + size
    inside = _inner(shape, shape.intermediate_size) * values
    if not shape.num_experts:
        return inside
    copies = shape.experts_per_token * 2 * shape.hidden_size * size
    routing = shape.num_experts * 2 + shape.hidden_size * shape.router_in_float32
    share = shape.expert_layers / shape.num_layers
    return inside + share * (copies + routing * FLOAT32_BYTES)


def _by_operation(
    shape: ModelShape,
    tp: int,
    size: int,
    ulysses: bool,
    kind: Checkpointing,
    lora: LoraSpec | None,
) -> float:
    """Bytes that `elementwise` and `selective` store besides the layer's input: outputs of products
    and of attention; with tp also the two scattered outputs."""
    names = [name for name, *_ in shape.products]
    stored = stored_products(kind, names, tp=tp, open_end=shape.has_open_end(lora))
    outputs = sum(outputs for at, (*_, outputs) in enumerate(shape.products) if at in stored)
    # Ulysses stores what it exchanged before and after attention.
    exchanged = shape.query_size + shape.key_size + shape.value_size + shape.result_size
    outputs += shape.result_size + ulysses * exchanged
    scattered = 2 * shape.hidden_size * size * (tp > 1)
    return (outputs * size + scattered + shape.num_heads * FLOAT32_BYTES) / tp


def _unneeded(shape: ModelShape, tp: int, size: int, lora: LoraSpec | None) -> float:
    """Bytes of stored outputs that no gradient needs, so they stay until the layer is done."""
    *_, outputs = shape.products[-1]
    return outputs * size / tp if tp > 1 or shape.has_open_end(lora) else 0.0


def _usages(
    shape: ModelShape, tp: int, size: int, parts: _Parts, lora: LoraSpec | None
) -> tuple[LayerUsage, ...]:
    """Points in the order of the backward pass: in the MLP, before the MLP, and in the first norm.

    The backward pass of an RMS norm holds five float32 values at once besides its input: the
    derivatives of its square, mean and product. That of a layer norm holds its result.
    """
    hidden, inner = shape.hidden_size * size, shape.up_size * size / tp
    incoming, together = hidden / tp, _inner(shape, shape.up_size) * size / tp
    outward, into = shape.hidden_size * shape.intermediate_size, shape.hidden_size * shape.up_size
    weights = (math.ceil(outward / tp), math.ceil((outward + into) / tp), _split(shape, tp))
    if lora is not None:
        weights = (0, 0, 0)
    elif shape.num_experts:
        # The gradient of all experts is one tensor, no matter which were chosen.
        weights = (
            shape.num_experts * weights[0],
            shape.num_experts * weights[1],
            _split(shape, tp),
        )
    # The gradients of gate and up replace that of their product.
    product = 0 if lora is not None and "down_proj" not in lora.target_modules else 1
    if shape.gated:
        widest = together * (3 - product) / 2
        if tp > 1:
            widest = max(widest, hidden + together / 2)
    else:
        widest = 2 * inner
    in_norm = 2 * hidden / tp
    if not shape.has_layer_norms:
        in_norm = shape.hidden_size * 6 * FLOAT32_BYTES / tp
    found = [
        LayerUsage(parts.whole + widest + incoming, weights[0]),
        LayerUsage(parts.attention + in_norm + incoming, weights[1]),
        LayerUsage(in_norm + 3 * incoming, weights[2]),
    ]
    if tp > 1:
        found += _in_tensor_parallel(parts, weights, hidden, inner, incoming)
    return tuple(found)


def _in_tensor_parallel(
    parts: _Parts, weights: tuple[int, int, int], hidden: float, inner: float, incoming: float
) -> Iterator[LayerUsage]:
    """Points in the MLP's backward pass where tensors with the tokens of all tp ranks exist."""
    rest = parts.attention + parts.mlp_norm + incoming
    if not parts.regathers:
        # The gradients of the inputs of gate and up, and the reduce-scatter buffer for their sum.
        yield LayerUsage(rest + 3 * hidden, weights[1])
        return
    # The gathered input and its gradient by up; gate, its gradient and that of its activation.
    yield LayerUsage(rest + 2 * hidden + 1.5 * inner, (weights[0] + weights[1]) // 2)
    # The gathered input, its gradients by up and gate, and the gradient of gate.
    yield LayerUsage(rest + 3 * hidden + inner / 2, weights[1])


def _split(shape: ModelShape, tp: int) -> int:
    split, replicated = layer_sizes(shape)
    return math.ceil(split / tp) + replicated

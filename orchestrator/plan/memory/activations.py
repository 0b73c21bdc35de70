"""What a decoder layer keeps of each token from its forward pass to its backward pass.

Counted tensor by tensor, as Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) count, for the
operations of transformers' models and an attention kernel that keeps no score matrix
(FlashAttention, Dao et al. 2022). `tests/plan/memory/test_traced.py` compares with what the
trainer itself allocates.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import Checkpointing, Setup
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES


class LayerUsage(NamedTuple):
    """A point of one layer's backward pass at which much is there at once."""

    tokens: float
    """Bytes per token, of what the layer keeps by then and of temporary values."""
    weights: int
    """Elements of the layer's weight gradients that are there, on this rank."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes per token of the sequence part that a rank has."""

    whole: float
    """Without checkpointing."""
    kept: float
    """With it, from forward to backward; the layer's input among it."""
    usages: tuple[LayerUsage, ...]
    """Of the backward pass, with what is computed again; of the kept there is what is not told
    apart from it."""
    plain_usages: tuple[LayerUsage, ...]
    """The same without checkpointing."""
    last_norm: float
    """What the norm after the last layer keeps, and what goes into the head."""


def layer_of(setup: Setup) -> Layer:
    kind: Checkpointing = "full" if setup.checkpointing == "every_k" else setup.checkpointing
    ulysses = setup.mesh.cp > 1 and setup.context == "ulysses"
    return _layer(setup.shape, setup.mesh.tp, _values(setup), ulysses, kind, setup.lora)


@dataclass(frozen=True, slots=True)
class _Values:
    """Bytes of a value."""

    size: int
    """That is computed with."""
    hidden: int
    """Of the hidden states. FSDP casts weights and inputs; autocast, which DDP and ZeRO-1 have,
    leaves float32 weights where they are, so that all but products comes out in float32."""

    @property
    def autocast(self) -> bool:
        """Each product casts its own input, and keeps that."""
        return self.hidden > self.size


def _values(setup: Setup) -> _Values:
    size = COMPUTE_BYTES[setup.dtype]
    return _Values(size, size if setup.data == "fsdp" else FLOAT32_BYTES)


@cache
def _layer(
    shape: ModelShape,
    tp: int,
    values: _Values,
    ulysses: bool,
    kind: Checkpointing,
    lora: LoraSpec | None,
) -> Layer:
    parts = _Parts.of(shape, tp, values, ulysses, lora)
    plain = _usages(shape, tp, values, parts, lora)
    hidden = shape.hidden_size * values.hidden / tp
    kept = {"none": parts.whole, "selective": _by_matmuls(shape, tp, values, ulysses)}.get(
        kind, hidden
    )
    # What was kept and is computed again all the same goes with the layer; the rest is there twice.
    twice = {"none": 0.0, "full": hidden, "selective": _twice(shape, tp, values.size)}[kind]
    if values.autocast:
        # The first norm takes its input as it is.
        twice -= {"none": 0.0, "full": hidden, "selective": 0.0}[kind]
    return Layer(
        whole=parts.whole,
        kept=kept,
        usages=tuple(LayerUsage(m.tokens + twice, m.weights) for m in plain),
        plain_usages=plain,
        last_norm=_norm(shape, tp, values, lora is None)
        + (0 if lora else shape.hidden_size * values.size),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Bytes per token that a layer without checkpointing keeps."""

    attention: float
    """With the norm before it."""
    mlp_norm: float
    mlp: float

    @property
    def whole(self) -> float:
        return self.attention + self.mlp_norm + self.mlp

    @classmethod
    def of(
        cls, shape: ModelShape, tp: int, values: _Values, ulysses: bool, lora: LoraSpec | None
    ) -> "_Parts":
        """The matmuls keep the norms' results, which tensor parallelism gathers.

        Adapters alone need their own inputs; a frozen matrix needs none for its gradient.
        """
        targets, size = None if lora is None else set(lora.target_modules), values.size
        query, kv, heads = shape.query_size, shape.kv_size, shape.num_heads
        attention = (2 * query + 2 * kv + query * ulysses) * size + heads * FLOAT32_BYTES
        if shape.qk_norm:
            attention += (query + kv) * (FLOAT32_BYTES + size)
        into = shape.hidden_size * size
        norm = _norm(shape, tp, values, trained=lora is None)
        further = (shape.layer_norms - 2) / 2 * norm
        enters = _met(shape, targets, "q_proj", "k_proj", "v_proj", "c_attn")
        mlp_enters = _met(shape, targets, "gate_proj", "up_proj", "c_fc")
        if not values.autocast:
            enters, mlp_enters = min(1, enters), min(1, mlp_enters)
        return cls(
            attention=norm + into * enters + further + attention / tp,
            mlp_norm=norm + into * mlp_enters + further,
            mlp=_mlp(shape, size, targets) / tp,
        )


def _met(shape: ModelShape, targets: set[str] | None, *names: str) -> int:
    """How many of the layer's matrices by these names are trained, or have adapters."""
    there = {name for name, _, _ in shape.linear}.intersection(names)
    return len(there if targets is None else there & targets)


def _norm(shape: ModelShape, tp: int, values: _Values, trained: bool = True) -> float:
    """Of one norm, whose tokens sequence parallelism cuts.

    transformers computes RMS norms in float32 and keeps their input so, and, for the gradient of
    the scale, what is scaled. A layer norm keeps its input.
    """
    if shape.norm_bias:
        return shape.hidden_size * values.hidden / tp
    scaled = FLOAT32_BYTES if shape.norms_in_float32 else values.hidden
    return shape.hidden_size * (FLOAT32_BYTES + scaled * trained) / tp


def _mlp(shape: ModelShape, size: int, targets: set[str] | None) -> float:
    """Before tensor parallelism cuts it: gate, up, the activated gate and their product; without a
    gate the five values that GPT-2's approximated GELU is made of. Each of a token's experts has
    its own, and a copy of what goes in and of what comes out."""
    if not shape.gated:
        return 5 * shape.intermediate_size * size
    product = targets is None or "down_proj" in targets
    inside = (3 + product) * shape.intermediate_size * size
    if not shape.num_experts:
        return inside
    routed = shape.experts_per_token * (inside + 2 * shape.hidden_size * size)
    return routed + shape.num_experts * 2 * FLOAT32_BYTES


def _by_matmuls(shape: ModelShape, tp: int, values: _Values, ulysses: bool) -> float:
    """Of one layer's input and the results of its matmuls and its attention.

    Two of the matmuls are as wide as the model on every tp rank, before their sum is scattered;
    with tp the two gathered inputs and the two scattered sums are kept as well.
    """
    met = shape.experts_per_token if shape.num_experts else 1
    split = 2 * shape.query_size + 2 * shape.kv_size + met * shape.up_size
    split += shape.query_size * ulysses + shape.hidden_size * (3 if tp > 1 else 1)
    whole = shape.hidden_size * (4 if tp > 1 else 1 + met)
    wider = shape.hidden_size * (1 / tp + 2 * (tp > 1)) * (values.hidden - values.size)
    return (whole + split / tp) * values.size + wider + shape.num_heads * FLOAT32_BYTES / tp


def _twice(shape: ModelShape, tp: int, size: int) -> float:
    """Of what `selective` keeps: the layer's input, and what its two last matmuls came to, which no
    gradient needs."""
    if tp == 1:
        return 2 * shape.hidden_size * size
    return (2 + 3 / tp) * shape.hidden_size * size


def _usages(
    shape: ModelShape, tp: int, values: _Values, parts: _Parts, lora: LoraSpec | None
) -> tuple[LayerUsage, ...]:
    """In the order of the backward pass: in the MLP, before it, and in the first norm.

    An RMS norm's backward pass has five float32 values at once beside its input, which the
    derivatives of its square, mean and product are made of; a layer norm's has its result.
    """
    hidden, inner = shape.hidden_size * values.size, shape.up_size * values.size / tp
    incoming = shape.hidden_size * values.hidden / tp
    met = shape.experts_per_token if shape.num_experts else 1
    outward, into = shape.hidden_size * shape.intermediate_size, shape.hidden_size * shape.up_size
    weights = (math.ceil(outward / tp), math.ceil((outward + into) / tp), _split(shape, tp))
    if lora is not None:
        weights = (0, 0, 0)
    elif shape.num_experts:
        # The gradient of all experts is one tensor, whichever were chosen.
        weights = (
            shape.num_experts * weights[0],
            shape.num_experts * weights[1],
            _split(shape, tp),
        )
    # The gradients of what the gate and the way up came to take the place of their product's.
    product = 0 if lora is not None and "down_proj" not in lora.target_modules else 1
    if shape.gated:
        widest = met * inner * (3 - product) / 2
        if tp > 1:
            widest = max(widest, hidden + met * inner / 2)
    else:
        widest = 2 * inner
    in_norm = 2 * hidden / tp
    if not shape.norm_bias:
        in_norm = shape.hidden_size * 6 * FLOAT32_BYTES / tp
    found = [
        LayerUsage(parts.whole + widest + incoming, weights[0]),
        LayerUsage(parts.attention + in_norm + incoming, weights[1]),
        LayerUsage(in_norm + 3 * incoming, weights[2]),
    ]
    if tp > 1:
        # The gradients of gate's and up's inputs, and their sum laid out for the reduce-scatter.
        found.append(
            LayerUsage(parts.attention + parts.mlp_norm + 3 * hidden + incoming, weights[1])
        )
    return tuple(found)


def _split(shape: ModelShape, tp: int) -> int:
    return math.ceil(shape.layer_weights / tp) + shape.layer_replicated

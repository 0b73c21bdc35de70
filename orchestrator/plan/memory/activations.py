"""What a decoder layer keeps of each token from its forward pass to its backward pass.

Counted tensor by tensor, as Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) count, for the
operations of transformers' models and an attention kernel that keeps no score matrix
(FlashAttention, Dao et al. 2022). `tests/plan/memory/test_traced.py` compares with what the
trainer itself allocates.
"""

import math
from dataclasses import dataclass
from functools import cache

from orchestrator.contract.model import LoraSpec
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import Checkpointing, Setup
from orchestrator.plan.sizes import COMPUTE_BYTES, FLOAT32_BYTES


@dataclass(frozen=True, slots=True)
class Moment:
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
    moments: tuple[Moment, ...]
    """Of the backward pass, with what is computed again; of the kept there is what is not told
    apart from it."""
    plain_moments: tuple[Moment, ...]
    """The same without checkpointing."""
    last_norm: float
    """What the norm after the last layer keeps, and what goes into the head."""


def layer_of(setup: Setup) -> Layer:
    kind: Checkpointing = "full" if setup.checkpointing == "every_k" else setup.checkpointing
    ulysses = setup.mesh.cp > 1 and setup.context == "ulysses"
    return _layer(setup.shape, setup.mesh.tp, COMPUTE_BYTES[setup.dtype], ulysses, kind, setup.lora)


@cache
def _layer(
    shape: ModelShape,
    tp: int,
    size: int,
    ulysses: bool,
    kind: Checkpointing,
    lora: LoraSpec | None,
) -> Layer:
    parts = _Parts.of(shape, tp, size, ulysses, lora)
    plain = _moments(shape, tp, size, parts, lora)
    hidden = shape.hidden_size * size / tp
    kept = {"none": parts.whole, "selective": _by_matmuls(shape, tp, size, ulysses)}.get(
        kind, hidden
    )
    # What was kept and is computed again all the same goes with the layer; the rest is there twice.
    twice = {"none": 0.0, "full": hidden, "selective": _twice(shape, tp, size)}[kind]
    return Layer(
        whole=parts.whole,
        kept=kept,
        moments=tuple(Moment(m.tokens + twice, m.weights) for m in plain),
        plain_moments=plain,
        last_norm=_norm(shape, tp, size) + shape.hidden_size * size,
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
        cls, shape: ModelShape, tp: int, size: int, ulysses: bool, lora: LoraSpec | None
    ) -> "_Parts":
        """The matmuls keep the norms' results, which tensor parallelism gathers.

        Adapters alone need their own inputs; a frozen matrix needs none for its gradient.
        """
        targets = None if lora is None else set(lora.target_modules)
        query, kv, heads = shape.query_size, shape.kv_size, shape.num_heads
        attention = (2 * query + 2 * kv + query * ulysses) * size + heads * FLOAT32_BYTES
        if shape.qk_norm:
            attention += (query + kv) * (FLOAT32_BYTES + size)
        into = shape.hidden_size * size
        norm = _norm(shape, tp, size, trained=lora is None)
        further = (shape.layer_norms - 2) / 2 * norm
        enters = into if _meets(targets, "q_proj", "k_proj", "v_proj", "c_attn") else 0
        mlp_enters = into if _meets(targets, "gate_proj", "up_proj", "c_fc") else 0
        return cls(
            attention=norm + enters + further + attention / tp,
            mlp_norm=norm + mlp_enters + further,
            mlp=_mlp(shape, size, targets) / tp,
        )


def _meets(targets: set[str] | None, *names: str) -> bool:
    return targets is None or not targets.isdisjoint(names)


def _norm(shape: ModelShape, tp: int, size: int, trained: bool = True) -> float:
    """Of one norm, whose tokens sequence parallelism cuts.

    transformers computes RMS norms in float32 and keeps their input so, and, for the gradient of
    the scale, what is scaled. A layer norm keeps its input.
    """
    if shape.norm_bias:
        return shape.hidden_size * size / tp
    scaled = FLOAT32_BYTES if shape.norms_in_float32 else size
    return shape.hidden_size * (FLOAT32_BYTES + scaled * trained) / tp


def _mlp(shape: ModelShape, size: int, targets: set[str] | None) -> float:
    """Before tensor parallelism cuts it: gate, up, the activated gate and their product; without a
    gate the five values that GPT-2's approximated GELU is made of. Each of a token's experts has
    its own, and a copy of what goes in and of what comes out."""
    if not shape.gated:
        return 5 * shape.intermediate_size * size
    product = _meets(targets, "down_proj")
    inside = (3 + product) * shape.intermediate_size * size
    if not shape.num_experts:
        return inside
    routed = shape.experts_per_token * (inside + 2 * shape.hidden_size * size)
    return routed + shape.num_experts * 2 * FLOAT32_BYTES


def _by_matmuls(shape: ModelShape, tp: int, size: int, ulysses: bool) -> float:
    """Of one layer's input and the results of its matmuls and its attention.

    Two of the matmuls are as wide as the model on every tp rank, before their sum is scattered;
    with tp the two gathered inputs and the two scattered sums are kept as well.
    """
    met = shape.experts_per_token if shape.num_experts else 1
    split = 2 * shape.query_size + 2 * shape.kv_size + met * shape.up_size
    split += shape.query_size * ulysses + shape.hidden_size * (3 if tp > 1 else 1)
    whole = shape.hidden_size * (4 if tp > 1 else 1 + met)
    return (whole + split / tp) * size + shape.num_heads * FLOAT32_BYTES / tp


def _twice(shape: ModelShape, tp: int, size: int) -> float:
    """Of what `selective` keeps: the layer's input, and what its two last matmuls came to, which no
    gradient needs."""
    if tp == 1:
        return 2 * shape.hidden_size * size
    return (2 + 3 / tp) * shape.hidden_size * size


def _moments(
    shape: ModelShape, tp: int, size: int, parts: _Parts, lora: LoraSpec | None
) -> tuple[Moment, ...]:
    """In the order of the backward pass: in the MLP, before it, and in the first norm.

    An RMS norm's backward pass has five float32 values at once beside its input, which the
    derivatives of its square, mean and product are made of; a layer norm's has its result.
    """
    hidden, inner = shape.hidden_size * size, shape.up_size * size / tp
    incoming = hidden / tp
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
        Moment(parts.whole + widest + incoming, weights[0]),
        Moment(parts.attention + in_norm + incoming, weights[1]),
        Moment(in_norm + 3 * incoming, weights[2]),
    ]
    if tp > 1:
        # The gradients of gate's and up's inputs, and their sum laid out for the reduce-scatter.
        found.append(Moment(parts.attention + parts.mlp_norm + 3 * hidden + incoming, weights[1]))
    return tuple(found)


def _split(shape: ModelShape, tp: int) -> int:
    return math.ceil(shape.layer_weights / tp) + shape.layer_replicated

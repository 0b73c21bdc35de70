"""How long the layers of a model take on one rank, without any communication.

Matrix products and attention by their operations, all else by the bytes that it reads and writes:
operation by operation as transformers' models are written, or fused as torch.compile fuses them.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.plan.cost.kernels import attention_s, matmul_s, move_s
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.sizes import COMPUTE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one rank has of a micro batch."""

    sequences: int
    tokens: int
    """Of a whole sequence."""
    tp: int = 1
    cp: int = 1
    context: str = "ring"
    """How attention sees what cp cuts."""
    dtype: str = "bfloat16"
    compiled: bool = False
    float8: bool = False
    lora: LoraSpec | None = None
    """The weights are frozen then: they need no gradients of their own."""

    @property
    def rows(self) -> int:
        """Tokens that this rank's matrix products see: tp gathers them, cp does not."""
        return self.sequences * self.tokens // self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds on the device and on its host, of one micro batch."""

    forward: float
    inputs: float
    """Of the backward pass, what gradients of inputs take."""
    weights: float
    """And what gradients of weights take, which nobody waits for but the optimizer."""
    forward_ops: int = 0
    backward_ops: int = 0
    cheap: float = 0.0
    """Of the forward pass, what is neither a matrix product nor attention."""

    @property
    def backward(self) -> float:
        return self.inputs + self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Bytes that a value of the given kind is read and written, for values of 2 bytes."""

    norm: tuple[float, float]
    layer_norm: tuple[float, float]
    residual: tuple[float, float]
    rotary: tuple[float, float]
    gated: tuple[float, float]
    gelu: tuple[float, float]
    ops: tuple[int, int]
    """Kernels of a layer, forward and backward, beside matrix products and attention."""


# Counted from transformers' modules, as autograd runs them. A root mean square norm: to float32,
# square, mean, times the inverse root, back, times the weight. Rotary: two halves, cat, two
# products, a sum, for queries and keys. Gated: silu and a product; gelu_new: eight operations.
EAGER = Fusion(
    norm=(36, 76),
    layer_norm=(4, 10),
    residual=(6, 6),
    rotary=(20, 24),
    gated=(10, 18),
    gelu=(36, 72),
    ops=(36, 70),
)
# One kernel for each chain: values are read once and written once; norms' backward reads twice.
COMPILED = Fusion(
    norm=(4, 10),
    layer_norm=(4, 10),
    residual=(4, 4),
    rotary=(4, 4),
    gated=(6, 10),
    gelu=(4, 6),
    ops=(7, 12),
)
EXPERT_TILE = 64
"""Rows to which those of an expert are filled up."""
DISPATCH_BYTES = 8
"""Read and written of each value of 2 bytes that goes to an expert, and as much on its way back."""
FLOAT8_BYTES = {False: 14, True: 6}
"""Of each value that goes into a product in float8, to find its largest and to cast it, twice
(torchao, tensor-wise scales): eager and compiled."""


@lru_cache(maxsize=4096)
def layer_passes(machine: Machine, shape: ModelShape, part: Slice) -> Passes:
    """One decoder layer."""
    products = _products(machine, shape, part)
    attention = attention_of(machine, shape, part)
    cheap = cheap_of(machine, shape, part)
    beside = (0.0, 0.0) if part.lora is None else _adapters(machine, shape, part, part.lora)
    matmuls = sum(product.alike for product in linears(shape, part))
    extra = COMPILED.ops if part.compiled else EAGER.ops
    return Passes(
        forward=products[0] + attention[0] + cheap[0] + beside[0],
        inputs=products[1] + attention[1] + cheap[1] + beside[1],
        weights=products[2],
        forward_ops=matmuls + 1 + extra[0],
        backward_ops=2 * matmuls + 2 + extra[1],
        cheap=cheap[0],
    )


def _inner_values(shape: ModelShape) -> float:
    """Of a token inside the MLP, on average over the layers."""
    if not shape.num_experts:
        return shape.intermediate_size
    share = shape.expert_layers / shape.num_layers
    met = shape.experts_per_token * shape.intermediate_size
    return share * met + (1 - share) * shape.dense_intermediate_size


class Product(NamedTuple):
    """A layer's matrix products that are `alike`: [rows, into] times [into, out], one for each of
    `experts`, which share the rows."""

    rows: int
    into: int
    out: int
    experts: int
    share: float
    """Of the layers, that have it."""
    alike: int = 1


def linears(shape: ModelShape, part: Slice) -> list[Product]:
    """As cut over tp."""
    hidden, tp, rows = shape.hidden_size, part.tp, part.rows
    query, kv = math.ceil(shape.query_size / tp), math.ceil(shape.kv_size / tp)
    if shape.fused:
        found = [Product(rows, hidden, query + 2 * kv, 1, 1.0)]
    else:
        found = [Product(rows, hidden, query, 1, 1.0), Product(rows, hidden, kv, 1, 1.0, alike=2)]
    found.append(Product(rows, query, hidden, 1, 1.0))
    with_experts = shape.expert_layers / shape.num_layers if shape.num_experts else 0.0
    if with_experts:
        chosen = math.ceil(rows * shape.experts_per_token / shape.num_experts)
        # A kernel for all experts has tiles of each of them.
        together = shape.num_experts * math.ceil(chosen / EXPERT_TILE) * EXPERT_TILE
        found.append(Product(rows, hidden, shape.num_experts, 1, with_experts))
        inner = math.ceil(shape.intermediate_size / tp)
        found += _mlp(shape, together, inner, shape.num_experts, with_experts)
    if with_experts < 1:
        inner = shape.dense_intermediate_size if shape.num_experts else shape.intermediate_size
        found += _mlp(shape, rows, math.ceil(inner / tp), 1, 1 - with_experts)
    return found


def _mlp(
    shape: ModelShape, rows: int, inner: int, experts: int, share: float
) -> tuple[Product, Product]:
    hidden, ways_up = shape.hidden_size, 2 if shape.gated else 1
    return (
        Product(rows, hidden, inner, experts, share, alike=ways_up),
        Product(rows, inner, hidden, experts, share),
    )


def _products(machine: Machine, shape: ModelShape, part: Slice) -> tuple[float, float, float]:
    kind = "float8" if part.float8 else part.dtype
    forward = inputs = weights = 0.0
    for rows, into, out, experts, of_layers, alike in linears(shape, part):
        share = of_layers * alike
        # Each expert's weights are read, however few rows it has.
        least = move_s(machine, experts * into * out * COMPUTE_BYTES[kind]) if experts > 1 else 0.0
        forward += share * max(least, matmul_s(machine, rows, out, into, kind))
        inputs += share * max(least, matmul_s(machine, rows, into, out, kind))
        if part.lora is None:
            weights += share * matmul_s(machine, into, experts * out, rows // experts, kind)
        if part.float8:
            cast = share * FLOAT8_BYTES[part.compiled] / 2
            forward += move_s(machine, cast * rows * into)
            inputs += move_s(machine, cast * rows * out)
    return forward, inputs, weights


def attention_of(machine: Machine, shape: ModelShape, part: Slice) -> tuple[float, float]:
    """Forward and backward. Half of all pairs, or those inside a window."""
    tokens = part.tokens
    window = min(tokens, shape.window or tokens)
    pairs = window * (tokens - window / 2) * part.sequences / part.cp
    width = math.ceil(shape.query_size / part.tp)
    seen = tokens if part.context == "ulysses" else tokens / part.cp
    return attention_s(machine, pairs, width, shape.head_dim, seen)


def cheap_of(machine: Machine, shape: ModelShape, part: Slice) -> tuple[float, float]:
    """Norms, residuals, rotary embeddings and activations, forward and backward."""
    fusion = COMPILED if part.compiled else EAGER
    scale = COMPUTE_BYTES[part.dtype] / 2
    rows, tp = part.rows, part.tp
    heads = (shape.query_size + shape.kv_size) / tp
    norms = shape.layer_norms * shape.hidden_size / tp + (heads if shape.qk_norm else 0)
    seconds = []
    for way in (0, 1):
        norm = fusion.layer_norm[way] if shape.norm_bias else fusion.norm[way]
        size = norms * norm + 2 * shape.hidden_size / tp * fusion.residual[way]
        if not shape.learned_positions:
            size += heads * fusion.rotary[way]
        act = fusion.gated[way] if shape.gated else fusion.gelu[way]
        size += _inner_values(shape) / tp * act
        if shape.num_experts:
            size += 2 * shape.experts_per_token * shape.hidden_size * DISPATCH_BYTES
        seconds.append(move_s(machine, rows * size * scale, fusion.ops[way]))
    return seconds[0], seconds[1]


def _adapters(
    machine: Machine, shape: ModelShape, part: Slice, lora: LoraSpec
) -> tuple[float, float]:
    """LoRA's narrow products, which memory bounds: inputs are read, results are written and added;
    and 4-bit weights, which are written out for each pass (Dettmers et al. 2023, section 3)."""
    targets = [(into, out) for name, into, out in shape.linear if name in lora.target_modules]
    size, rows = COMPUTE_BYTES[part.dtype], part.rows / part.tp
    forward = sum(size * rows * (into + 4 * out) for into, out in targets)
    backward = sum(size * rows * (3 * into + 2 * out) for into, out in targets)
    if lora.quantize == "nf4":
        written = shape.layer_matrices / part.tp * (0.5 + size)
        forward, backward = forward + written, backward + written
    kernels = 3 * len(targets)
    return move_s(machine, forward, kernels), move_s(machine, backward, 2 * kernels)


LOSS_BYTES = (14, 24)
"""Read and written of each logit of 2 bytes, forward and backward: to float32 and log-softmax; its
gradient, made in float32 and cast back. The loss is not compiled with the layers."""


@lru_cache(maxsize=4096)
def head_passes(machine: Machine, shape: ModelShape, part: Slice) -> Passes:
    """The last norm, the head and the loss."""
    vocabulary, rows = math.ceil(shape.vocab_size / part.tp), part.rows
    into = shape.hidden_size
    cheap, back = head_cheap(machine, shape, part)
    weights = matmul_s(machine, into, vocabulary, rows, part.dtype) if part.lora is None else 0.0
    return Passes(
        forward=matmul_s(machine, rows, vocabulary, into, part.dtype) + cheap,
        inputs=matmul_s(machine, rows, into, vocabulary, part.dtype) + back,
        weights=weights,
        forward_ops=12,
        backward_ops=18,
        cheap=cheap,
    )


def head_cheap(machine: Machine, shape: ModelShape, part: Slice) -> tuple[float, float]:
    """Of the norm and the loss, forward and backward."""
    norm = EAGER.layer_norm if shape.norm_bias else EAGER.norm
    values = part.rows * shape.hidden_size / part.tp
    logits = part.rows * math.ceil(shape.vocab_size / part.tp) * COMPUTE_BYTES[part.dtype] / 2
    forward = move_s(machine, values * norm[0] + logits * LOSS_BYTES[0], 12)
    return forward, move_s(machine, values * norm[1] + logits * LOSS_BYTES[1], 18)


@lru_cache(maxsize=4096)
def embedding_passes(machine: Machine, shape: ModelShape, part: Slice) -> Passes:
    """Rows that are looked up, and added up in the backward pass."""
    size = COMPUTE_BYTES[part.dtype] * part.rows * shape.hidden_size / part.tp
    forward = move_s(machine, 2 * size, 2)
    return Passes(forward=forward, inputs=0.0, weights=2 * forward, forward_ops=4, backward_ops=4)

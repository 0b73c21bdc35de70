"""The computation time of a model's layers on one rank, without communication.

Matrix products and attention are costed by their operations. Everything else is costed by the bytes
that it reads and writes: either operation by operation, as transformers' models run in eager mode,
or fused, as with torch.compile.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.train_spec import Checkpointing, chunks_of_loss, repeated_products
from orchestrator.plan.cost.kernels import attention_s, matmul_s, move_s
from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.model.shape import ModelShape, split_dim
from orchestrator.plan.sizes import COMPUTE_BYTES


class Slice(Struct, frozen=True, kw_only=True):
    """One rank's part of a micro batch, and the settings that its time depends on."""

    sequences: int
    tokens: int
    """Length of a whole sequence."""
    document: int | None = None
    """Mean length of a document, if attention does not cross its end."""
    tp: int = 1
    cp: int = 1
    context: str = "ring"
    """Method of context parallelism."""
    dtype: str = "bfloat16"
    compiled: bool = False
    float8: bool = False
    lora: LoraSpec | None = None
    """With LoRA the weights are frozen, so they need no weight gradients."""
    repeats_last: bool = False
    """Recomputation of a whole layer also repeats its last product and reduce-scatter, although no
    gradient needs them."""

    @property
    def rows(self) -> int:
        """Rows of this rank's matrix products. tp gathers the tokens of its ranks, cp does not."""
        return self.sequences * self.tokens // self.cp


class Passes(Struct, frozen=True, kw_only=True):
    """Seconds of one micro batch on the device, and the number of operations that the host
    starts."""

    forward: float
    inputs: float
    """Part of the backward pass that computes gradients of inputs."""
    weights: float
    """Part of the backward pass that computes gradients of weights. Only the optimizer needs
    these."""
    forward_ops: int = 0
    backward_ops: int = 0
    cheap: float = 0.0
    """Part of the forward pass other than attention and matrix products, except the narrow ones of
    adapters."""
    last: float = 0.0
    """Part of the forward pass that no gradient needs: the MLP's last product and the residual. See
    `Slice.repeats_last`."""

    @property
    def backward(self) -> float:
        return self.inputs + self.weights


class Fusion(Struct, frozen=True, kw_only=True):
    """Bytes read and written per value of 2 bytes, forward and backward, for each kind of
    operation."""

    norm: tuple[float, float]
    layer_norm: tuple[float, float]
    residual: tuple[float, float]
    rotary: tuple[float, float]
    gated: tuple[float, float]
    gelu: tuple[float, float]
    ops: tuple[int, int]
    """Kernels of a layer, forward and backward, without matrix products and attention."""


# Counted from transformers' modules, as autograd runs them. RMS norm: cast to float32, square,
# mean, multiply by the inverse root, cast back, multiply by the weight. Rotary: two halves, cat,
# two products, one sum, for queries and keys. Gated: silu and a product. gelu_new: eight
# operations.
EAGER = Fusion(
    norm=(36, 76),
    layer_norm=(4, 10),
    residual=(6, 6),
    rotary=(20, 24),
    gated=(10, 18),
    gelu=(36, 72),
    ops=(36, 70),
)
# One kernel per chain of operations: values are read once and written once. The backward pass of a
# norm reads them twice.
COMPILED = Fusion(
    norm=(4, 10),
    layer_norm=(4, 10),
    residual=(4, 4),
    rotary=(4, 4),
    gated=(6, 10),
    gelu=(4, 6),
    ops=(7, 12),
)
TENSOR_OPS: Mapping[bool, tuple[int, int]] = {False: (80, 90), True: (4, 4)}
"""What axis tp adds to the operations of a layer, forward and backward. Keyed by whether the layer
is compiled: then only its collectives. An eager layer also takes this rank's part of each weight,
and the collectives go through Python. Measured on a CPU, in units of ordinary operations: a layer
without tp takes 1.1 ms to start, with tp 2.5 ms."""
EXPERT_TILE = 64
"""The rows of an expert are padded to a multiple of this."""
DISPATCH_BYTES = 8
"""Bytes read and written per value of 2 bytes that is sent to an expert, and the same on the way
back."""
JOINED_BYTES = 4
"""Bytes read and written per value of 2 bytes that is copied."""
FLOAT8_BYTES = {False: 14, True: 6}
"""Bytes per input value of a float8 product, to find the maximum and to cast, twice (torchao,
tensor-wise scales). Keyed by whether the layer is compiled."""


@lru_cache(maxsize=4096)
def layer_passes(machine: Machine, shape: ModelShape, part: Slice) -> Passes:
    """One decoder layer."""
    products = _products(machine, shape, part)
    attention = attention_of(machine, shape, part)
    cheap = cheap_of(machine, shape, part)
    beside = (0.0, 0.0) if part.lora is None else _adapters(machine, shape, part, part.lora)
    matmuls = sum(product.alike for product in linears(shape, part))
    extra = COMPILED.ops if part.compiled else EAGER.ops
    tensor = TENSOR_OPS[part.compiled] if part.tp > 1 else (0, 0)
    return Passes(
        forward=products[0] + attention[0] + cheap[0] + beside[0],
        inputs=products[1] + attention[1] + cheap[1] + beside[1],
        weights=products[2],
        forward_ops=matmuls + 1 + extra[0] + tensor[0],
        backward_ops=2 * matmuls + 2 + extra[1] + tensor[1],
        cheap=cheap[0] + beside[0],
        last=_last(machine, shape, part),
    )


def _last(machine: Machine, shape: ModelShape, part: Slice) -> float:
    """Seconds of the operations at a layer's end whose results no gradient needs. Recomputation
    stops before them (`torch.utils.checkpoint`, early stop)."""
    if shape.has_open_end(part.lora):
        return 0.0
    rows, into, out, *_ = linears(shape, part)[-1]
    kind = "float8" if part.float8 else part.dtype
    fusion = COMPILED if part.compiled else EAGER
    residual = rows * out / part.tp * fusion.residual[0] * COMPUTE_BYTES[part.dtype] / 2
    return matmul_s(machine, rows, out, into, kind) + move_s(machine, residual, 1)


def _inner_values(shape: ModelShape) -> float:
    """Inner features of the MLP per token, averaged over the layers."""
    if not shape.num_experts:
        return shape.intermediate_size
    share = shape.expert_layers / shape.num_layers
    met = shape.experts_per_token * shape.intermediate_size + shape.shared_size
    return share * met + (1 - share) * shape.dense_intermediate_size


class Product(NamedTuple):
    """`alike` equal matrix products of a layer: [rows, into] x [into, out]. With `experts` > 1
    there is one per expert, and together they have `rows` rows."""

    rows: int
    into: int
    out: int
    experts: int
    share: float
    """Share of the layers that have this product."""
    first: int | None
    """Position of the first one in `ModelShape.products`; None for the router of experts."""
    alike: int = 1


def linears(shape: ModelShape, part: Slice) -> list[Product]:
    """The matrix products of a layer on one tp rank."""
    hidden, tp, rows = shape.hidden_size, part.tp, part.rows
    found = _of_attention(shape, rows, tp)
    with_experts = shape.expert_layers / shape.num_layers if shape.num_experts else 0.0
    if with_experts:
        chosen = math.ceil(rows * shape.experts_per_token / shape.num_experts)
        # One kernel processes all experts, and each expert's rows are padded to whole tiles.
        together = shape.num_experts * math.ceil(chosen / EXPERT_TILE) * EXPERT_TILE
        found.append(Product(rows, hidden, shape.num_experts, 1, with_experts, None))
        last = len(shape.products) - 1
        inner = math.ceil(shape.intermediate_size / tp)
        found += _mlp(shape, together, inner, shape.num_experts, with_experts, last)
    for inner, share in _plain_mlps(shape, with_experts):
        last = len(shape.linear) - 1
        found += _mlp(shape, rows, math.ceil(inner / tp), 1, share, last)
    return found


def _plain_mlps(shape: ModelShape, with_experts: float) -> Iterator[tuple[int, float]]:
    """Inner features of the MLPs that all tokens use, and the share of layers that have them."""
    if not shape.num_experts:
        yield shape.intermediate_size, 1.0
        return
    if shape.shared_size:
        yield shape.shared_size, with_experts
    if with_experts < 1:
        yield shape.dense_intermediate_size, 1 - with_experts


def _of_attention(shape: ModelShape, rows: int, tp: int) -> list[Product]:
    hidden = shape.hidden_size
    if shape.latent or shape.attention_gate:
        linear = enumerate(shape.linear[: shape.linear_of_attention])
        return [
            Product(rows, *_cut(name, into, out, tp), 1, 1.0, at)
            for at, (name, into, out) in linear
        ]
    query, kv = math.ceil(shape.query_size / tp), math.ceil(shape.key_size / tp)
    last = Product(rows, query, hidden, 1, 1.0, 1 if shape.fused else 3)
    if shape.fused:
        return [Product(rows, hidden, query + 2 * kv, 1, 1.0, 0), last]
    queries = Product(rows, hidden, query, 1, 1.0, 0)
    return [queries, Product(rows, hidden, kv, 1, 1.0, 1, alike=2), last]


def _cut(name: str, inputs: int, outputs: int, tp: int) -> tuple[int, int]:
    """Inputs and outputs of a linear layer on one tp rank."""
    match split_dim(name):
        case 0:
            return inputs, math.ceil(outputs / tp)
        case 1:
            return math.ceil(inputs / tp), outputs
        case _:
            return inputs, outputs


def _mlp(
    shape: ModelShape, rows: int, inner: int, experts: int, share: float, last: int
) -> tuple[Product, Product]:
    """The products of an MLP; `last` is the position of the last one in `ModelShape.products`."""
    hidden, ways_up = shape.hidden_size, 2 if shape.gated else 1
    return (
        Product(rows, hidden, inner, experts, share, last - ways_up, alike=ways_up),
        Product(rows, inner, hidden, experts, share, last),
    )


def _products(machine: Machine, shape: ModelShape, part: Slice) -> tuple[float, float, float]:
    kind = "float8" if part.float8 else part.dtype
    forward = inputs = weights = 0.0
    for product in linears(shape, part):
        rows, into, out, experts, of_layers, _, alike = product
        share = of_layers * alike
        forward += share * _forward(machine, part, product)
        turned = product._replace(into=out, out=into)
        inputs += share * _forward(machine, part, turned)
        if part.lora is None:
            weights += share * matmul_s(machine, into, experts * out, rows // experts, kind)
    return forward, inputs, weights


def _forward(machine: Machine, part: Slice, product: Product) -> float:
    """Seconds of one product, with the cast of its input for float8."""
    kind = "float8" if part.float8 else part.dtype
    rows, into, out, experts, *_ = product
    seconds = matmul_s(machine, rows, out, into, kind)
    if experts > 1:
        # The weights of all experts are read, even if an expert has few rows.
        seconds = max(seconds, move_s(machine, experts * into * out * COMPUTE_BYTES[kind]))
    if part.float8:
        seconds += move_s(machine, FLOAT8_BYTES[part.compiled] / 2 * rows * into)
    return seconds


def repeated_s(machine: Machine, shape: ModelShape, part: Slice, kind: Checkpointing) -> float:
    """Seconds of the products of a layer that a mode of `BY_OPERATION` computes again."""
    names = [name for name, *_ in shape.products]
    open_end = shape.has_open_end(part.lora)
    again = repeated_products(kind, names, tp=part.tp, open_end=open_end)
    return sum(
        product.share * _forward(machine, part, product)
        for product in linears(shape, part)
        for position in again
        if product.first is not None and product.first <= position < product.first + product.alike
    )


def attention_of(machine: Machine, shape: ModelShape, part: Slice) -> tuple[float, float]:
    """Seconds forward and backward. Causal attention needs half of all (query, key) pairs, or those
    inside the window, or those of each document. Documents of unequal length have more pairs."""
    tokens = part.tokens
    window = min(tokens, shape.window or tokens)
    pairs = window * (tokens - window / 2) * part.sequences / part.cp
    width = math.ceil(shape.query_size / part.tp)
    seen = tokens if part.context == "ulysses" else tokens / part.cp
    if part.document is not None and part.document < tokens:
        pairs = min(pairs, tokens * part.document / 2 * part.sequences / part.cp)
        seen = min(seen, part.document)
    forward, backward = attention_s(
        machine, pairs, width, shape.head_dim, seen, part.rows, part.dtype
    )
    if shape.latent:
        # One of two products forward, and two of five backward, have the width of the values.
        share = shape.value_dim / shape.head_dim
        return forward * (1 + share) / 2, backward * (3 + 2 * share) / 5
    return forward, backward


def cheap_of(machine: Machine, shape: ModelShape, part: Slice) -> tuple[float, float]:
    """Seconds of norms, residuals, rotary embeddings and activations, forward and backward."""
    fusion = COMPILED if part.compiled else EAGER
    scale = COMPUTE_BYTES[part.dtype] / 2
    rows, tp = part.rows, part.tp
    heads = (shape.query_size + shape.key_size) / tp
    norms = shape.layer_norms * shape.hidden_size / tp + (heads if shape.has_qk_norms else 0)
    norms += shape.latent_size
    seconds = []
    for way in (0, 1):
        norm = fusion.layer_norm[way] if shape.has_layer_norms else fusion.norm[way]
        size = norms * norm + 2 * shape.hidden_size / tp * fusion.residual[way]
        size += shape.rotary_size / tp * fusion.rotary[way]
        if shape.latent:
            # The parts of queries and keys with and without rotary embeddings are copied together.
            size += heads * JOINED_BYTES
        if way == 1:
            size += 2 * _biased(shape) / tp
        act = fusion.gated[way] if shape.gated else fusion.gelu[way]
        size += _inner_values(shape) / tp * act
        if shape.num_experts:
            size += 2 * shape.experts_per_token * shape.hidden_size * DISPATCH_BYTES
        seconds.append(move_s(machine, rows * size * scale, fusion.ops[way]))
    return seconds[0], seconds[1]


def _biased(shape: ModelShape) -> int:
    """Features of a layer's linear layers with a bias. Its gradient is a sum over all rows, for
    which the gradient of the output is read once more."""
    linear = sum(outputs for name, _, outputs in shape.linear if shape.has_bias(name))
    expert = (shape.up_size + shape.hidden_size) * shape.expert_bias
    return linear + shape.experts_per_token * expert


def _adapters(
    machine: Machine, shape: ModelShape, part: Slice, lora: LoraSpec
) -> tuple[float, float]:
    """Seconds of LoRA, forward and backward.

    Its narrow products are memory-bound: inputs are read, results are written and added. 4-bit
    weights are dequantised for each pass (Dettmers et al. 2023, section 3).
    """
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
"""Bytes read and written per logit of 2 bytes: forward, the cast to float32 and log-softmax;
backward, the gradient in float32 and the cast back. The loss is never compiled."""
HEAD_OPS = (12, 18)
"""Kernels of the last norm, the head and the loss, forward and backward."""


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
        forward_ops=HEAD_OPS[0],
        backward_ops=HEAD_OPS[1],
        cheap=cheap,
    )


def logits_again_s(machine: Machine, shape: ModelShape, part: Slice) -> float:
    """Seconds to compute the logits and the loss once more, without the norm before them."""
    vocabulary = math.ceil(shape.vocab_size / part.tp)
    size = part.rows * vocabulary * COMPUTE_BYTES[part.dtype] / 2 * LOSS_BYTES[0]
    product = matmul_s(machine, part.rows, vocabulary, shape.hidden_size, part.dtype)
    return product + move_s(machine, size, HEAD_OPS[0])


@lru_cache(maxsize=4096)
def smaller_chunks_s(machine: Machine, shape: ModelShape, part: Slice, chunks: int) -> float:
    """Seconds by which the head takes longer in so many chunks than in those of `loss_chunks:
    auto`, which the calibration includes: products with fewer rows, and the gradient of the weights
    is read and written for each chunk."""
    usual = chunks_of_loss("auto", part.rows)
    many = chunks_of_loss(chunks, part.rows) if chunks else usual
    if many <= usual:
        return 0.0
    vocabulary, hidden = math.ceil(shape.vocab_size / part.tp), shape.hidden_size

    def products(number: int) -> float:
        rows = math.ceil(part.rows / number)
        one = matmul_s(machine, rows, vocabulary, hidden, part.dtype)
        one += matmul_s(machine, rows, hidden, vocabulary, part.dtype)
        if part.lora is None:
            one += matmul_s(machine, hidden, vocabulary, rows, part.dtype)
        return number * one

    added = 0.0
    if part.lora is None:
        added = (many - usual) * 2 * vocabulary * hidden * COMPUTE_BYTES[part.dtype]
    return max(0.0, products(many) - products(usual)) + move_s(machine, added)


def head_cheap(machine: Machine, shape: ModelShape, part: Slice) -> tuple[float, float]:
    """Seconds of the last norm and the loss, forward and backward."""
    norm = EAGER.layer_norm if shape.has_layer_norms else EAGER.norm
    values = part.rows * shape.hidden_size / part.tp
    logits = part.rows * math.ceil(shape.vocab_size / part.tp) * COMPUTE_BYTES[part.dtype] / 2
    forward = move_s(machine, values * norm[0] + logits * LOSS_BYTES[0], HEAD_OPS[0])
    size = values * norm[1] + logits * LOSS_BYTES[1]
    return forward, move_s(machine, size, HEAD_OPS[1])


@lru_cache(maxsize=4096)
def embedding_passes(machine: Machine, shape: ModelShape, part: Slice) -> Passes:
    """The embedding: a lookup of rows, and a scatter-add in the backward pass."""
    size = COMPUTE_BYTES[part.dtype] * part.rows * shape.hidden_size / part.tp
    forward = move_s(machine, 2 * size, 2)
    return Passes(forward=forward, inputs=0.0, weights=2 * forward, forward_ops=4, backward_ops=4)

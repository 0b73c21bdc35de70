"""The shape of a model, and its exact number of parameters."""

from collections.abc import Iterator
from functools import cache, cached_property
from typing import NamedTuple

from msgspec import Struct

from orchestrator.contract.spec.model_spec import LoraSpec

Tensor = tuple[int, int, int | None]
"""Rows, columns, and the dimension that tp splits (None: neither)."""
BY_INPUTS = frozenset({"o_proj", "down_proj", "c_proj"})
"""Linear layers whose inputs tp splits. It splits the outputs of the others."""
NOT_SPLIT = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})
"""Linear layers that each tp rank holds whole, because all heads need their outputs."""
OF_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "c_fc"})


class Latent(Struct, frozen=True, kw_only=True):
    """Latent attention (MLA; DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): queries, keys and
    values are computed from narrow vectors, and a head of values has another size than one of keys.
    """

    query_rank: int
    """0: queries are computed from the hidden state."""
    kv_rank: int
    rope_dim: int
    """Features of a query head with rotary embeddings. The key heads share theirs."""
    value_dim: int


# A search looks the shape up in caches thousands of times.
class ModelShape(Struct, frozen=True, kw_only=True, cache_hash=True, dict=True):
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner features of the MLP; with experts, of one expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Features of a head of queries and keys."""
    max_positions: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    """The query, key and value projections have biases."""
    out_bias: bool = False
    """The attention output projection has a bias."""
    mlp_bias: bool = False
    """Linear layers of MLPs have biases; those of routed experts have not."""
    head_bias: bool = False
    latent: Latent | None = None
    sinks: bool = False
    """Each head has a logit that takes attention away from all tokens (gpt-oss)."""
    norm_scale: bool = True
    """Norms have weights; those of OLMo have none."""
    norm_bias: bool = False
    """Norms are layer norms with a bias; else RMS norms."""
    bare_layer_norms: bool = False
    """Norms are layer norms with weights, but without a bias (MPT)."""
    norms_in_float32: bool = False
    """Norms apply their scale in float32, as Gemma does. Llama casts back first."""
    norms_subtract_mean: bool = False
    """Norms subtract the mean in operations of their own, as Cohere's do."""
    layer_norms: int = 2
    """Norms of width `hidden_size` in a decoder layer."""
    same_input: bool = False
    """Attention and MLP have the layer's input, each with a norm of its own or both with one."""
    sub_norms: bool = False
    """The inputs of the last projections of attention and of the MLP have norms (BitNet)."""
    qk_norm_sizes: tuple[int, ...] = ()
    """Weights of the norms of queries and of keys, for each head or for all; empty: there are
    none."""
    bare_qk_norms: bool = False
    """Queries and keys have norms without weights (nanochat)."""
    attention_gate: bool = False
    """A product of the layer's input weighs the results of attention (AFMoE)."""
    gated: bool = True
    """The MLP has a gate projection besides the up projection."""
    mlp_values: float = 4
    """Values that an MLP stores for the backward pass, per inner feature: gate, up, the activated
    gate and the product; without a gate those of its activation."""
    activation_weights: int = 0
    """Parameters of the activation (Apertus)."""
    num_experts: int = 0
    """Routed experts in a layer; 0: every layer has a single MLP."""
    experts_per_token: int = 0
    expert_bias: bool = False
    router_bias: bool = False
    router_in_float32: bool = False
    """The input of the router is cast to float32."""
    shared_size: int = 0
    """Inner features of all experts together that every token uses."""
    shared_gate: bool = False
    """A product with one output weighs the shared experts (Qwen2-MoE)."""
    dense_layers: tuple[int, ...] = ()
    """Decoder layers without experts. They have one MLP of `dense_intermediate_size`."""
    dense_intermediate_size: int = 0
    rotary: bool = True
    """Queries and keys have rotary embeddings, unless positions are learned."""
    partial_rotary: bool = False
    """Rotary embeddings turn a part of each head, which is then joined with the rest."""
    learned_positions: bool = False
    extra_positions: int = 0
    """Learned positions besides `max_positions` (OPT)."""
    embedding_norm: bool = False
    """The embedding has a norm (BLOOM)."""
    one_projection: bool = False
    """transformers computes query, key and value by one projection, but tp can split it."""
    fused: bool = False
    """Query, key and value share one projection, which tp cannot split."""
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    """Of the results of attention and MLP."""
    window: int | None = None
    """Tokens of a sliding attention window. None: full attention. 0: other kinds of attention."""
    notes: tuple[str, ...] = ()
    """Probable mistakes in the config."""
    untrainable: str | None = None
    """Why the bundled trainer cannot train this model, although it can be planned."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def value_size(self) -> int:
        return self.num_kv_heads * self.value_dim

    @property
    def result_size(self) -> int:
        """Results of attention, the inputs of its last linear layer."""
        return self.num_heads * self.value_dim

    @property
    def rotary_size(self) -> int:
        """Features of queries and keys that rotary embeddings turn."""
        if self.learned_positions or not self.rotary:
            return 0
        if self.latent:
            return (self.num_heads + 1) * self.latent.rope_dim
        return self.query_size + self.key_size

    @property
    def latent_size(self) -> int:
        """Features of the narrow vectors of latent attention, which have norms."""
        return self.latent.query_rank + self.latent.kv_rank if self.latent else 0

    @property
    def up_size(self) -> int:
        """Output features of the up projection and, if there is one, of the gate."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def mlp_matrices(self) -> int:
        """Weights of the MLP, or of one expert."""
        return self.hidden_size * (self.up_size + self.intermediate_size)

    @cached_property
    def linear(self) -> tuple[tuple[str, int, int], ...]:
        """Name, inputs and outputs of each linear layer of a decoder layer. Routed experts are not
        linear layers: transformers stores all of a layer in one parameter."""
        hidden, inner = self.hidden_size, self.intermediate_size
        if self.fused:
            return (
                ("c_attn", hidden, self.query_size + 2 * self.key_size),
                ("c_proj", self.query_size, hidden),
                ("c_fc", hidden, inner),
                ("c_proj", inner, hidden),
            )
        inner = self.shared_size if self.num_experts else inner
        return *self._attention(), *(self._mlp(inner) if inner else ())

    def _attention(self) -> Iterator[tuple[str, int, int]]:
        hidden, latent = self.hidden_size, self.latent
        if latent is None:
            yield "q_proj", hidden, self.query_size
            yield "k_proj", hidden, self.key_size
            yield "v_proj", hidden, self.value_size
        else:
            if latent.query_rank:
                yield "q_a_proj", hidden, latent.query_rank
                yield "q_b_proj", latent.query_rank, self.query_size
            else:
                yield "q_proj", hidden, self.query_size
            yield "kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rope_dim
            without_rope = self.key_size - self.num_heads * latent.rope_dim
            yield "kv_b_proj", latent.kv_rank, without_rope + self.value_size
        if self.attention_gate:
            yield "attention_gate", hidden, self.result_size
        yield "o_proj", self.result_size, hidden

    def _mlp(self, inner: int) -> Iterator[tuple[str, int, int]]:
        if self.gated:
            yield "gate_proj", self.hidden_size, inner
        yield "up_proj", self.hidden_size, inner
        yield "down_proj", inner, self.hidden_size

    def has_bias(self, name: str) -> bool:
        """Whether the linear layer `name` has a bias."""
        if self.fused:
            return True
        if name in OF_MLP:
            return self.mlp_bias
        if name == "o_proj":
            return self.out_bias
        if name == "attention_gate":
            return False
        return self.qkv_bias and (self.latent is None or name in NOT_SPLIT)

    @property
    def linear_of_attention(self) -> int:
        """How many of `linear` belong to attention."""
        return sum(name not in OF_MLP for name, *_ in self.linear)

    @property
    def products(self) -> tuple[tuple[str, int, int], ...]:
        """The matrix products of a decoder layer in their order: the name of the linear layer, and
        its inputs and outputs per token. The products of all experts of a token count as one."""
        if not self.num_experts:
            return self.linear
        chosen = self.experts_per_token
        experts = self._mlp(self.intermediate_size)
        return *self.linear, *((name, into, chosen * out) for name, into, out in experts)

    def has_open_end(self, lora: LoraSpec | None) -> bool:
        """Something after a layer's last product stores values: its adapter, dropout, or the
        weights of experts."""
        name, *_ = self.products[-1]
        adapted = lora is not None and name in lora.target_modules
        return adapted or self.residual_dropout > 0 or self.num_experts > 0

    @property
    def expert_layers(self) -> int:
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    @property
    def router(self) -> int:
        """Weights of the router, which chooses the experts of a token, and of the gate of shared
        experts."""
        return self.hidden_size * (self.num_experts + self.shared_gate)

    @property
    def layer_matrices(self) -> int:
        """Weights of one decoder layer that a token is multiplied with: all linear layers, and of
        its experts those that it uses."""
        linear = sum(inputs * outputs for _, inputs, outputs in self.linear)
        return linear + self.experts_per_token * self.mlp_matrices + self.router

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of width `hidden_size`."""
        return self.hidden_size * (self.norm_scale + self.norm_bias)

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding; the head has as many, and its bias."""
        return self.vocab_size * self.hidden_size

    @property
    def positions(self) -> int:
        """Learned positions."""
        return (self.max_positions + self.extra_positions) * self.learned_positions

    @property
    def input_parameters(self) -> int:
        """Parameters before the layers, besides the embedding."""
        return self.positions * self.hidden_size + self.norm_parameters * self.embedding_norm

    @property
    def has_qk_norms(self) -> bool:
        return bool(self.qk_norm_sizes) or self.bare_qk_norms

    @property
    def has_layer_norms(self) -> bool:
        """Norms are torch's layer norms; else operations of their own."""
        return self.norm_bias or self.bare_layer_norms

    @property
    def parameters(self) -> int:
        """The exact number of parameters of the transformers model; tied weights count once."""
        dense = len(self.dense_layers)
        layers = (self.num_layers - dense) * sum(layer_sizes(self))
        if dense:
            layers += dense * sum(layer_sizes(self, dense=True))
        return self.outer_parameters + layers

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of decoder layers."""
        vocabulary = self.vocabulary_parameters * (1 if self.tied_embeddings else 2)
        bias = self.vocab_size * self.head_bias
        return vocabulary + bias + self.input_parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all except the experts that are not chosen for it."""
        idle = self.num_experts - self.experts_per_token
        expert = self.mlp_matrices + (self.up_size + self.hidden_size) * self.expert_bias
        return self.parameters - self.expert_layers * idle * expert


def split_dim(name: str) -> int | None:
    """The dimension of the weights of a linear layer that tp splits; rows are outputs."""
    return None if name in NOT_SPLIT else int(name in BY_INPUTS)


def norm_tensors(shape: ModelShape) -> list[Tensor]:
    """Of one norm of width `hidden_size`."""
    return [(shape.hidden_size, 1, None)] * (shape.norm_scale + shape.norm_bias)


def layer_tensors(shape: ModelShape, *, dense: bool = False) -> Iterator[Tensor]:
    """The tensors of one decoder layer in transformers; `dense`: of one of `dense_layers`. Each
    expert is split by itself."""
    yield from norm_tensors(shape) * shape.layer_norms
    yield from [(size, 1, None) for size in shape.qk_norm_sizes]
    if shape.latent:
        yield from [(size, 1, None) for size in (shape.latent.query_rank, shape.latent.kv_rank)]
    if shape.sinks:
        yield shape.num_heads, 1, 0
    if shape.sub_norms:
        yield from [(size, 1, None) for size in (shape.hidden_size, shape.intermediate_size)]
    yield from [(1, 1, None)] * shape.activation_weights
    linear = shape.linear
    if dense:
        attention = (one for one in linear if one[0] not in OF_MLP)
        linear = *attention, *shape._mlp(shape.dense_intermediate_size)
    for name, inputs, outputs in linear:
        cut = split_dim(name)
        if shape.fused:
            # GPT-2 stores its matrices transposed.
            yield inputs, outputs, None if cut is None else 1 - cut
        else:
            yield outputs, inputs, cut
        if shape.has_bias(name):
            yield outputs, 1, 0 if cut == 0 else None
    if shape.num_experts and not dense:
        yield from _expert_tensors(shape)


def _expert_tensors(shape: ModelShape) -> Iterator[Tensor]:
    hidden, many = shape.hidden_size, shape.num_experts
    for _ in range(1 + shape.gated):
        yield many * shape.intermediate_size, hidden, 0
        if shape.expert_bias:
            yield many * shape.intermediate_size, 1, 0
    yield many * hidden, shape.intermediate_size, 1
    if shape.expert_bias:
        yield many * hidden, 1, None
    yield many, hidden, None
    if shape.router_bias:
        yield many, 1, None
    if shape.shared_gate:
        yield 1, hidden, None


class LayerSizes(NamedTuple):
    """Parameters of a decoder layer."""

    split: int
    """Those that tp splits."""
    replicated: int
    """Those that each tp rank holds: norms, the router, biases of row-wise linear layers."""


@cache
def layer_sizes(shape: ModelShape, *, dense: bool = False) -> LayerSizes:
    """Parameters of a layer, or of one of `dense_layers`."""
    tensors = list(layer_tensors(shape, dense=dense))
    split = sum(rows * columns for rows, columns, cut in tensors if cut is not None)
    return LayerSizes(split, sum(rows * columns for rows, columns, _ in tensors) - split)

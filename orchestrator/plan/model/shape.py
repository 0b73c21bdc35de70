"""The shape of a model, and its exact number of parameters."""

from msgspec import Struct

from orchestrator.contract.spec.model_spec import LoraSpec


# A search looks the shape up in caches thousands of times.
class ModelShape(Struct, frozen=True, kw_only=True, cache_hash=True):
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner features of the MLP; with experts, of one expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    """The query, key and value projections have biases."""
    out_bias: bool = False
    """The attention output projection has a bias."""
    mlp_bias: bool = False
    norm_bias: bool = False
    """Norms are layer norms with a bias; else RMS norms."""
    norms_in_float32: bool = False
    """Norms apply their scale in float32, as Gemma does. Llama casts back first."""
    layer_norms: int = 2
    """Norms of width `hidden_size` in a decoder layer."""
    qk_norm_sizes: tuple[int, ...] = ()
    """Weights of the norms of queries and of keys, for each head or for all; empty: there are
    none."""
    gated: bool = True
    """The MLP has a gate projection besides the up projection."""
    num_experts: int = 0
    """Experts in each of `expert_layers`; 0: every layer has a single MLP."""
    experts_per_token: int = 0
    expert_layers: int = 0
    """Decoder layers with experts. The others have one MLP of `dense_intermediate_size`."""
    dense_intermediate_size: int = 0
    learned_positions: bool = False
    fused: bool = False
    """Query, key and value share one projection, which tp cannot split."""
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    """Of the results of attention and MLP."""
    window: int | None = None
    """Tokens of a sliding attention window. None: full attention. 0: other kinds of attention."""
    linear: tuple[tuple[str, int, int], ...] = ()
    """Name, inputs and outputs of each linear layer of a decoder layer."""
    notes: tuple[str, ...] = ()
    """Probable mistakes in the config."""
    untrainable: str | None = None
    """Why the bundled trainer cannot train this model, although it can be planned."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def up_size(self) -> int:
        """Output features of the up projection and, if there is one, of the gate."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def attention_matrices(self) -> int:
        return 2 * self.hidden_size * (self.query_size + self.kv_size)

    @property
    def mlp_matrices(self) -> int:
        """Weights of the MLP, or of one expert."""
        return self.hidden_size * (self.up_size + self.intermediate_size)

    @property
    def products(self) -> tuple[tuple[str, int], ...]:
        """The matrix products of a decoder layer in their order: the name of the linear layer, and
        its outputs per token. The products of all experts of a token count as one."""
        products = tuple((name, outputs) for name, _, outputs in self.linear)
        if not self.num_experts:
            return products
        inner = self.experts_per_token * self.intermediate_size
        outputs = self.experts_per_token * self.hidden_size
        up = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        return (*products, *((name, inner) for name in up), ("down_proj", outputs))

    def has_open_end(self, lora: LoraSpec | None) -> bool:
        """Something after a layer's last product stores values: its adapter, dropout, or the
        weights of experts."""
        name, _ = self.products[-1]
        adapted = lora is not None and name in lora.target_modules
        return adapted or self.residual_dropout > 0 or self.num_experts > 0

    @property
    def router(self) -> int:
        """Weights of the router, which chooses the experts of a token."""
        return self.hidden_size * self.num_experts

    @property
    def layer_matrices(self) -> int:
        """Weights of one decoder layer that a token is multiplied with: all linear layers, or those
        of its experts only."""
        mlps = self.experts_per_token if self.num_experts else 1
        return self.attention_matrices + mlps * self.mlp_matrices + self.router

    @property
    def layer_weights(self) -> int:
        """Parameters of one decoder layer that tp splits. With experts: of a layer with experts."""
        attention_biases = (self.query_size + 2 * self.kv_size) * self.qkv_bias
        mlps = max(1, self.num_experts) * self.mlp_matrices + self.up_size * self.mlp_bias
        return self.attention_matrices + attention_biases + mlps

    @property
    def layer_replicated(self) -> int:
        """Parameters of one decoder layer that each tp rank holds: norms, the router, and the
        biases of the two row-wise linear layers."""
        norms = self.layer_norms * self.norm_parameters + sum(self.qk_norm_sizes)
        return norms + self.router + self.hidden_size * (self.out_bias + self.mlp_bias)

    @property
    def layer_parameters(self) -> int:
        return self.layer_weights + self.layer_replicated

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of width `hidden_size`."""
        return self.hidden_size * (1 + self.norm_bias)

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def position_parameters(self) -> int:
        return self.max_positions * self.hidden_size * self.learned_positions

    @property
    def parameters(self) -> int:
        """The exact number of parameters of the transformers model; tied weights count once."""
        layers = self.num_layers * self.layer_parameters
        if self.num_experts:
            experts = self.num_experts * self.mlp_matrices + self.router
            dense = self.hidden_size * self.dense_intermediate_size * (3 if self.gated else 2)
            layers -= (self.num_layers - self.expert_layers) * (experts - dense)
        return self.outer_parameters + layers

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of decoder layers."""
        vocabulary = self.vocabulary_parameters * (1 if self.tied_embeddings else 2)
        return vocabulary + self.position_parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all except the experts that are not chosen for it."""
        idle = self.num_experts - self.experts_per_token
        return self.parameters - self.expert_layers * idle * self.mlp_matrices

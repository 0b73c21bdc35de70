"""The shape of a model, as far as its split, memory and speed depend on it, and its exact size."""

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Columns inside the MLP; with experts, inside one of them."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    """The projections to queries, keys and values have biases."""
    out_bias: bool = False
    """The one from attention's result has."""
    mlp_bias: bool = False
    norm_bias: bool = False
    """Norms are layer norms, which add a bias; else they scale alone."""
    norms_in_float32: bool = False
    """Norms scale before they leave float32, as Gemma's do; Llama's after."""
    layer_norms: int = 2
    """Norms as wide as the model in a decoder layer."""
    qk_norm: bool = False
    gated: bool = True
    """The MLP has a gate beside its way up."""
    num_experts: int = 0
    """MLPs of which each token meets a few, in each of `expert_layers`; 0: each layer has one."""
    experts_per_token: int = 0
    expert_layers: int = 0
    """Decoder layers with experts; the others have one MLP of `dense_intermediate_size`."""
    dense_intermediate_size: int = 0
    learned_positions: bool = False
    fused: bool = False
    """Queries, keys and values come from one matrix, which tensor parallelism cannot cut."""
    attention_dropout: float = 0.0
    window: int | None = None
    """Tokens that attention sees back; None is all of them, 0 where layers are of other kinds."""
    linear: tuple[tuple[str, int, int], ...] = ()
    """Name, inputs and outputs of each linear layer of a decoder layer."""
    notes: tuple[str, ...] = ()
    """What in the config looks like a mistake."""
    untrainable: str | None = None
    """Why the bundled trainer cannot train it, which can be planned all the same."""
    _hash: int = field(init=False, repr=False, compare=False)
    """Reckoned once: a search looks its shape up in caches many thousand times."""

    def __post_init__(self) -> None:
        values = tuple(getattr(self, one.name) for one in fields(self) if one.init)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def up_size(self) -> int:
        """Columns on the MLP's way up: gate and up together where there is a gate."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def attention_matrices(self) -> int:
        return 2 * self.hidden_size * (self.query_size + self.kv_size)

    @property
    def mlp_matrices(self) -> int:
        """Of the MLP, or of one expert."""
        return self.hidden_size * (self.up_size + self.intermediate_size)

    @property
    def router(self) -> int:
        """Weights that choose the experts of a token."""
        return self.hidden_size * self.num_experts

    @property
    def layer_matrices(self) -> int:
        """Weights that a token is multiplied with in one decoder layer: without experts, all of its
        linear layers."""
        met = self.experts_per_token if self.num_experts else 1
        return self.attention_matrices + met * self.mlp_matrices + self.router

    @property
    def layer_weights(self) -> int:
        """Parameters of one decoder layer that tensor parallelism splits; with experts, of a layer
        that has them."""
        attention_biases = (self.query_size + 2 * self.kv_size) * self.qkv_bias
        mlps = max(1, self.num_experts) * self.mlp_matrices + self.up_size * self.mlp_bias
        return self.attention_matrices + attention_biases + mlps

    @property
    def layer_replicated(self) -> int:
        """Parameters of one decoder layer that every tensor-parallel rank holds.

        Norms, the router, and the biases of the two linear layers whose input is what is split.
        """
        norms = self.layer_norms * self.norm_parameters + 2 * self.head_dim * self.qk_norm
        return norms + self.router + self.hidden_size * (self.out_bias + self.mlp_bias)

    @property
    def layer_parameters(self) -> int:
        return self.layer_weights + self.layer_replicated

    @property
    def norm_parameters(self) -> int:
        """Of one norm as wide as the model."""
        return self.hidden_size * (1 + self.norm_bias)

    @property
    def vocabulary_parameters(self) -> int:
        """Of the input embedding, and as many of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def position_parameters(self) -> int:
        return self.max_positions * self.hidden_size * self.learned_positions

    @property
    def parameters(self) -> int:
        """Exactly what the transformers model has, counted once where weights are tied."""
        layers = self.num_layers * self.layer_parameters
        if self.num_experts:
            experts = self.num_experts * self.mlp_matrices + self.router
            dense = self.hidden_size * self.dense_intermediate_size * (3 if self.gated else 2)
            layers -= (self.num_layers - self.expert_layers) * (experts - dense)
        return self.outer_parameters + layers

    @property
    def outer_parameters(self) -> int:
        """Of what is not in a decoder layer."""
        vocabulary = self.vocabulary_parameters * (1 if self.tied_embeddings else 2)
        return vocabulary + self.position_parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: all but the experts that are not chosen for it."""
        idle = self.num_experts - self.experts_per_token
        return self.parameters - self.expert_layers * idle * self.mlp_matrices

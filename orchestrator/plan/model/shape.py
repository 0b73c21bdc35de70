"""The shape of a model, as far as its split and its memory depend on it, and its exact size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
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
    qk_norm: bool = False
    gated: bool = True
    """The MLP has a gate beside its way up."""
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
    def layer_matrices(self) -> int:
        """Weights of one decoder layer's linear layers."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        return attention + self.hidden_size * (self.up_size + self.intermediate_size)

    @property
    def layer_weights(self) -> int:
        """Parameters of one decoder layer that tensor parallelism splits."""
        attention_biases = (self.query_size + 2 * self.kv_size) * self.qkv_bias
        return self.layer_matrices + attention_biases + self.up_size * self.mlp_bias

    @property
    def layer_replicated(self) -> int:
        """Parameters of one decoder layer that every tensor-parallel rank holds.

        Norms, and the biases of the two linear layers whose input is what is split.
        """
        norms = 2 * self.norm_parameters + 2 * self.head_dim * self.qk_norm
        return norms + self.hidden_size * (self.out_bias + self.mlp_bias)

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
        vocabulary = self.vocabulary_parameters * (1 if self.tied_embeddings else 2)
        layers = self.num_layers * self.layer_parameters
        return vocabulary + self.position_parameters + layers + self.norm_parameters

"""Assigns the layers of the model to pipeline stages. All ranks compute the same assignment."""

from transformers import PretrainedConfig

from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import cut, layer_costs, stages_of_rank
from orchestrator.errors import TrainingError
from trainer.model.decoder import StageSlice
from trainer.model.families import family_of


def slices_of_rank(
    config: PretrainedConfig, spec: PipelineSpec, pp: int, rank: int, tokens: int
) -> list[StageSlice]:
    """The stages of pipeline rank `rank` of `pp`, in the order of the model.

    Args:
        tokens: length of the sequences, which decides the cost of attention.

    Raises:
        TrainingError: there are more stages than layers.
    """
    layers, num_stages = config.num_hidden_layers, pp * spec.stages
    if pp == 1:
        return [StageSlice(0, layers, layers)]
    if layers < num_stages:
        raise TrainingError(
            f"parallel.pp={pp} with {spec.stages} stage(s) per rank makes {num_stages} pipeline"
            f" stages, but the model has {layers} layers",
            fix=f"set parallel.pp to {max(1, layers // spec.stages)} or less"
            + (", or choose fewer stages per rank" if spec.stages > 1 else ""),
        )
    cuts = cut(costs_of(config, tokens), num_stages)
    return [StageSlice(*cuts[stage], layers) for stage in stages_of_rank(spec, pp, rank)]


def costs_of(config: PretrainedConfig, tokens: int) -> list[int]:
    """Multiply-adds per token of each layer; the first includes the embedding, the last the
    head."""
    features, heads = config.hidden_size, config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or features // heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    mlp = family_of(config).mlp_matrices * features * (inner or 4 * features)
    return layer_costs(
        num_layers=config.num_hidden_layers,
        layer_matrices=2 * features * head_dim * (heads + groups) + mlp,
        query_size=heads * head_dim,
        hidden_size=features,
        vocab_size=config.vocab_size,
        tokens=tokens,
    )

"""Model FLOPs per token, by the same formula as the trainer's (`trainer/measure/flops.py`)."""

from functools import lru_cache

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.plan.model.shape import ModelShape


@lru_cache(maxsize=256)
def flops_per_token(shape: ModelShape, tokens: int, lora: LoraSpec | None = None) -> float:
    """Forward and backward: 6 N + 12 L H Q T (Chowdhery et al. 2022, appendix B).

    N excludes the embedding lookup and includes the head. The causal mask is ignored, and
    recomputation does not count. Only the experts that a token uses count. A frozen weight counts 4
    instead of 6.
    """
    layers = shape.active_parameters - shape.outer_parameters
    weights = layers + shape.norm_parameters + shape.vocabulary_parameters
    attention = 12.0 * shape.num_layers * shape.query_size * tokens
    if lora is None:
        return 6.0 * weights + attention
    sizes = (into + out for name, into, out in shape.linear if name in lora.target_modules)
    return 4.0 * weights + 6.0 * shape.num_layers * lora.rank * sum(sizes) + attention

"""Model FLOPs per token, by the same formula as the trainer's (`trainer/measure/flops.py`)."""

from functools import lru_cache

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.train_spec import BY_OPERATION, STORES_ALL, repeated_products
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.setup import Setup, every


@lru_cache(maxsize=256)
def flops_per_token(
    shape: ModelShape, tokens: int, lora: LoraSpec | None = None, document: int | None = None
) -> float:
    """Forward and backward: 6 N + 12 L H Q T (Chowdhery et al. 2022, appendix B). With latent
    attention 2 Q is the size of a head's keys and values together.

    N excludes the embedding lookup and includes the head. The causal mask is ignored, and
    recomputation does not count. Only the experts that a token uses count. A frozen weight counts 4
    instead of 6. T is at most the model's window and, with document masks, `document`, the mean
    length of a document: the device computes no scores beyond them.
    """
    layers = shape.active_parameters - shape.outer_parameters
    weights = layers + shape.norm_parameters + shape.vocabulary_parameters
    seen = attended_tokens(shape, tokens, document)
    attention = 6.0 * shape.num_layers * (shape.query_size + shape.result_size) * seen
    if lora is None:
        return 6.0 * weights + attention
    sizes = (into + out for name, into, out in shape.linear if name in lora.target_modules)
    return 4.0 * weights + 6.0 * shape.num_layers * lora.rank * sum(sizes) + attention


def attended_tokens(shape: ModelShape, tokens: int, document: int | None) -> int:
    """Tokens that attention can see from a token of a sequence, as if there were no causal mask."""
    return min(tokens, shape.window or tokens, document or tokens)


def recomputed_per_token(setup: Setup) -> float:
    """FLOPs of recomputation, counted in the same way. A repeated forward pass of the whole model
    would be a third of `flops_per_token`, but the head is not repeated, nor is the last product of
    a layer if no gradient needs its result."""
    shape, kind = setup.shape, setup.checkpointing
    if kind in STORES_ALL:
        return 0.0
    names, open_end = [name for name, *_ in shape.products], shape.has_open_end(setup.lora)
    products = [2.0 * inputs * outputs for _, inputs, outputs in shape.products]
    if kind in BY_OPERATION:
        again = repeated_products(kind, names, tp=setup.mesh.tp, open_end=open_end)
        return shape.num_layers * sum(products[at] for at in again)
    seen = attended_tokens(shape, setup.tokens, setup.document_tokens)
    attention = 2.0 * (shape.query_size + shape.result_size) * seen
    layer = attention + sum(products if open_end else products[:-1])
    layers = shape.num_layers if kind == "full" else shape.num_layers // every(setup)
    return layers * layer

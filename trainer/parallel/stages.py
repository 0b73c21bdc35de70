"""Which layers of the model each rank of a pipeline has: plain arithmetic, the same on every rank.

A stage is a run of consecutive layers; the embedding comes before those of the first stage, the
last norm and the head after those of the last.
"""

from collections.abc import Sequence
from itertools import accumulate

from transformers import PretrainedConfig

from orchestrator.contract.parallel import PipelineSpec
from orchestrator.errors import TrainingError
from trainer.model.decoder import StageSlice
from trainer.model.families import family_of


def slices_of_rank(
    config: PretrainedConfig, spec: PipelineSpec, pp: int, rank: int, tokens: int
) -> list[StageSlice]:
    """What the stages of `rank`, one of `pp`, are made of, in the order of the model; sequences
    have `tokens`.

    Raises:
        TrainingError: when there are more stages than layers.
    """
    layers, num_stages = config.num_hidden_layers, pp * spec.stages
    if pp == 1:
        return [StageSlice(0, layers, layers)]
    if layers < num_stages:
        raise TrainingError(
            f"parallel.pp={pp} with {spec.stages} stage(s) per rank makes {num_stages} pipeline"
            f" stages, and the model has {layers} layers",
            fix=f"set parallel.pp to {max(1, layers // spec.stages)} or less"
            + (", or choose fewer stages per rank" if spec.stages > 1 else ""),
        )
    cuts = cut(layer_costs(config, tokens), num_stages)
    return [StageSlice(*cuts[stage], layers) for stage in stages_of_rank(spec, pp, rank)]


def stages_of_rank(spec: PipelineSpec, pp: int, rank: int) -> list[int]:
    """Numbers of the stages of `rank`, ascending: every `pp`-th, or the two arms of a V."""
    if spec.schedule == "zbv":
        return [rank, 2 * pp - 1 - rank]
    return list(range(rank, pp * spec.stages, pp))


def rank_of_stage(spec: PipelineSpec, pp: int, stage: int) -> int:
    """The pipeline rank that has `stage`."""
    if spec.schedule == "zbv":
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def layer_costs(config: PretrainedConfig, tokens: int) -> list[int]:
    """Multiply-adds per token of the forward pass of each layer; the embedding's are counted with
    the first layer, the head's with the last. Backward costs twice as much, of all of them."""
    features, heads = config.hidden_size, config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or features // heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    projections = 2 * features * head_dim * (heads + groups)
    # Scores and sums over values, each with half of the tokens, those that came before.
    attention = heads * head_dim * tokens
    mlp = family_of(config).mlp_matrices * features * (inner or 4 * features)
    costs = [projections + attention + mlp] * config.num_hidden_layers
    # The embedding copies a row; nothing is multiplied.
    costs[0] += features
    costs[-1] += features * config.vocab_size
    return costs


def cut(costs: Sequence[int], num_stages: int) -> list[tuple[int, int]]:
    """(first, stop) of each stage: the dearest is as cheap as can be, then the others as even.

    Of cuts that are equally good the one with fewer layers in early stages is taken, for these keep
    the activations of more micro batches.
    """
    sums = [0, *accumulate(costs)]
    # How to cut the layers before `stop` best, with so many stages as the loop has come to:
    # the dearest stage, the sum of squares, and where each stage stops.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for stage in range(num_stages):
        last_stop = len(costs) - (num_stages - stage - 1)
        best = {
            stop: min(
                _with_stage(found, sums[stop] - sums[first], stop)
                for first, found in best.items()
                if first < stop
            )
            for stop in range(stage + 1, last_stop + 1)
        }
    stops = best[len(costs)][2]
    return list(zip([0, *stops], stops, strict=False))


def _with_stage(
    found: tuple[int, int, list[int]], cost: int, stop: int
) -> tuple[int, int, list[int]]:
    dearest, squares, stops = found
    return max(dearest, cost), squares + cost * cost, [*stops, stop]

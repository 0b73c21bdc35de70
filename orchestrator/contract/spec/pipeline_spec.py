"""What a pipeline schedule requires, and which layers each of its stages has.

The planner and the trainer both use it. The requirements are those of torch 2.13's schedules
(`torch.distributed.pipelining`), which raise an error on every rank after the job has started.
`tests/plan/test_stages.py` compares the two.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from orchestrator.contract.spec.parallel_spec import PipelineSpec

BACK_AND_FORTH = "zbv"
"""The schedule whose last stage is on the same rank as the first."""
SPLITS_BACKWARD = "zbv"
"""The schedule that computes the gradients of weights separately from those of inputs."""


def demand(spec: PipelineSpec, pp: int, micro_batches: int) -> str | None:
    """What the schedule requires if it cannot run `micro_batches` per step; None if it can."""
    if spec.schedule == "1f1b" and micro_batches < pp:
        return f"at least {pp}, one for each stage"
    rounds = max(1, micro_batches // pp)
    if spec.schedule == "interleaved_1f1b" and micro_batches % rounds:
        return f"equal parts in its {rounds} rounds, for example {rounds * pp}"
    return None


def stages_of_rank(spec: PipelineSpec, pp: int, rank: int) -> list[int]:
    """Numbers of the stages of `rank`, ascending: every `pp`-th one, or for `zbv` one on each arm
    of the V."""
    if spec.schedule == BACK_AND_FORTH:
        return [rank, 2 * pp - 1 - rank]
    return list(range(rank, pp * spec.stages, pp))


def rank_of_stage(spec: PipelineSpec, pp: int, stage: int) -> int:
    """The pipeline rank that runs `stage`."""
    if spec.schedule == BACK_AND_FORTH:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def layer_costs(
    *,
    num_layers: int,
    layer_matrices: int,
    query_size: int,
    hidden_size: int,
    vocab_size: int,
    tokens: int,
) -> list[int]:
    """Multiply-adds per token in the forward pass of each layer.

    The embedding counts as part of the first layer, the head as part of the last. The backward pass
    costs twice as much everywhere, so it does not change the balance.

    Args:
        layer_matrices: number of weights in the linear layers of one layer.
        query_size: width of all queries together.
        tokens: sequence length.
    """
    # Attention scores and the sums over values, each over half of the tokens (causal mask).
    costs = [layer_matrices + query_size * tokens] * num_layers
    # The embedding copies a row and multiplies nothing.
    costs[0] += hidden_size
    costs[-1] += hidden_size * vocab_size
    return costs


def cut(costs: Sequence[int], num_stages: int) -> list[tuple[int, int]]:
    """(first, stop) of each stage, with the lowest maximum cost, then the most even costs.

    Among equally good cuts the one with fewer layers in early stages wins, because early stages
    keep the activations of more micro batches.
    """
    sums = [0, *accumulate(costs)]
    # Dynamic programming over stages. For each `stop`: the best way to cut the layers before it
    # into the stages so far, as (maximum cost, sum of squared costs, where each stage stops).
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for stage in range(num_stages):
        last_stop = len(costs) - (num_stages - stage - 1)
        best = {
            stop: _with_stage(best, sums, stage, stop) for stop in range(stage + 1, last_stop + 1)
        }
    stops = best[len(costs)][2]
    return list(zip([0, *stops], stops, strict=False))


def _with_stage(
    best: Mapping[int, tuple[int, int, list[int]]], sums: Sequence[int], stage: int, stop: int
) -> tuple[int, int, list[int]]:
    """The best cut of the layers before `stop` whose last stage is number `stage`."""
    found: tuple[int, int, list[int]] | None = None
    for first in reversed(range(stage, stop) if stage else range(1)):
        cost = sums[stop] - sums[first]
        if found is not None and cost > found[0]:
            break  # an earlier start only makes this stage more expensive
        dearest, squares, stops = best[first]
        dearest, squares = max(dearest, cost), squares + cost * cost
        if found is None or (dearest, squares) <= found[:2]:
            candidate = dearest, squares, [*stops, stop]
            found = candidate if found is None else min(found, candidate)
    assert found is not None
    return found

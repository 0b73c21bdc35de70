"""The ranks along axis pp, as far as their work differs."""

from dataclasses import dataclass
from functools import lru_cache

from orchestrator.contract.parallel import PipelineSpec
from orchestrator.contract.pipeline import BACK_AND_FORTH, stages_of_rank
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.stages import stage_cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank along pp: how many layers, and whether it begins or ends the model."""

    layers: int
    is_first: bool
    is_last: bool


@lru_cache(maxsize=1024)
def ranks_along(
    shape: ModelShape, pp: int, spec: PipelineSpec, tokens: int
) -> tuple[tuple[Rank, int], ...]:
    """Each kind of rank along pp, and how many there are of it."""
    if pp == 1:
        return ((Rank(layers=shape.num_layers, is_first=True, is_last=True), 1),)
    cuts = stage_cuts(shape, pp * spec.stages, tokens)
    last = 0 if spec.schedule == BACK_AND_FORTH else pp - 1
    counts: dict[Rank, int] = {}
    for rank in range(pp):
        stages = [cuts[stage] for stage in stages_of_rank(spec, pp, rank)]
        layers = sum(stop - first for first, stop in stages)
        kind = Rank(layers=layers, is_first=rank == 0, is_last=rank == last)
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(counts.items())

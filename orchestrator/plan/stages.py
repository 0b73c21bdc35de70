"""What a pipeline asks of a job, and what each of its ranks has and keeps.

The demands are those of torch 2.13's schedules (`torch.distributed.pipelining`), which raise them
on every rank once the job has started; `tests/plan/test_stages.py` compares the two.
"""

from dataclasses import dataclass

from orchestrator.contract.parallel import PipelineSpec

BACK_AND_FORTH = "zbv"
"""The schedule whose last stage is on the same rank as the first."""
SPLITS_BACKWARD = "zbv"
"""The schedule that computes the gradients of weights apart from those of inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRank:
    """One rank's part of a pipeline."""

    layers: int
    """Of all its stages."""
    is_first: bool
    is_last: bool
    kept: float
    """Micro batches whose activations in all of its layers it keeps at once, at most."""


def stage_ranks(
    num_layers: int, pp: int, spec: PipelineSpec, micro_batches: int
) -> tuple[StageRank, ...]:
    """Every rank along pp; the layers as if each stage had the same number, rounded up."""
    if pp == 1:
        # Without a pipeline one micro batch goes back before the next goes forward.
        return (StageRank(layers=num_layers, is_first=True, is_last=True, kept=1),)
    stages = spec.stages
    layers = -(-num_layers // (pp * stages)) * stages
    last = 0 if spec.schedule == BACK_AND_FORTH else pp - 1
    return tuple(
        StageRank(
            layers=min(layers, num_layers),
            is_first=rank == 0,
            is_last=rank == last,
            kept=kept_passes(spec, pp, rank, micro_batches) / stages,
        )
        for rank in range(pp)
    )


def kept_passes(spec: PipelineSpec, pp: int, rank: int, micro_batches: int) -> int:
    """Passes through single stages that `rank` has gone forward and not yet back, at most.

    GPipe goes forward with all (Huang et al. 2019, section 2.3); 1F1B with as many as there are
    stages behind (Narayanan et al. 2019, PipeDream-Flush); interleaved 1F1B warms up with every
    stage but the last for a round, and two more for each rank behind (Narayanan et al. 2021,
    section 2.2; torch's `_get_warmup_ops`); ZBV keeps what 1F1B's first rank keeps, on every rank
    (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4).
    """
    most = micro_batches * spec.stages
    match spec.schedule:
        case "gpipe":
            return most
        case "1f1b":
            return min(most, pp - rank)
        case "interleaved_1f1b":
            a_round = micro_batches // max(1, micro_batches // pp)
            return min(most, (spec.stages - 1) * a_round + 2 * (pp - 1 - rank) + 1)
        case "zbv":
            return min(most, 2 * pp)


def takes(spec: PipelineSpec, pp: int, micro_batches: int) -> bool:
    """The schedule can do a step of so many micro batches."""
    return pp == 1 or demand(spec, pp, micro_batches) is None


def demand(spec: PipelineSpec, pp: int, micro_batches: int) -> str | None:
    """What the schedule wants instead of so many micro batches a step; None where they will do."""
    if spec.schedule == "1f1b" and micro_batches < pp:
        return f"at least {pp}, one for each stage"
    rounds = max(1, micro_batches // pp)
    if spec.schedule == "interleaved_1f1b" and micro_batches % rounds:
        return f"equal parts in its {rounds} rounds, for example {rounds * pp}"
    return None


def bubble(spec: PipelineSpec, pp: int, micro_batches: int) -> float | None:
    """Share of a step in which a rank waits for the others, were all stages equally fast.

    (pp - 1) / (v m + pp - 1) with v stages a rank (Narayanan et al. 2021, section 2.2). None for
    ZBV, which fills the most of it with the gradients of weights.
    """
    if spec.schedule == "zbv":
        return None
    return (pp - 1) / (spec.stages * micro_batches + pp - 1)

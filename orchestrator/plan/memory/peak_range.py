"""How far the peak memory of a rank may be off."""

import itertools
from collections.abc import Mapping

from orchestrator.plan.memory.reserve import CONTEXT_BYTES, MIB
from orchestrator.plan.setup import Setup

TRACED = (0.995, 1.003)
"""5th and 95th percentile of traced tensors, relative to planned ones: the 72 cells of
`benchmarks/results/memory.md`."""
SLACKS = (0.009, 0.077)
"""5th and 95th percentile of what torch's caching allocator holds in addition to tensors: the
fullest rank of 19 runs on B200 and 7 on H100 (`benchmarks/published/kernels/allocator.csv`). Runs
that differ in the number of micro batches alone hold the same and count once; a source of n runs
has the weight sqrt(n)."""
CONTEXTS = (CONTEXT_BYTES, 760 * MIB)
"""Memory of a process beside the allocator: the assumed context, and what a rank took on an H200
(`benchmarks/results/gpu.md`)."""
SLACK_DECILES = (
    *(0.009, 0.0099, 0.0153, 0.0172, 0.0246, 0.0294),
    *(0.0339, 0.0412, 0.0535, 0.07, 0.0794),
)
"""The same runs with the same weights: smallest, every tenth per cent, and largest."""
BASIS = "72 traced steps of the trainer, and the allocators of 26 published runs"


COMPILED = 0.9
"""Measured memory relative to planned, of the one compiled step without recomputation that was
measured (`benchmarks/results/gpu.md`): fused operations keep less. No such step is traced."""
UNTRACED_BASIS = f"{BASIS}, none of this family"
COMPILED_BASIS = f"{BASIS}; compiled layers took 10 % less, the one time that they were measured"


def peak_range(setup: Setup, tensors: int, reserve: Mapping[str, int]) -> tuple[int, int]:
    """A range with 9 of 10 peaks; `reserve` is empty for a CPU."""
    least, most = TRACED
    traced = (least * COMPILED if _keeps_less(setup) else least, most)
    low, high = (
        tensors * share * (1 + (slack if reserve else 0.0))
        + reserve.get("communication", 0)
        + (context if reserve else 0)
        for share, slack, context in zip(traced, SLACKS, CONTEXTS, strict=True)
    )
    return round(low), round(high)


def basis_of(setup: Setup) -> str:
    """What the range rests on."""
    if setup.shape.untrainable:
        return UNTRACED_BASIS
    return COMPILED_BASIS if _keeps_less(setup) else BASIS


def _keeps_less(setup: Setup) -> bool:
    # Recomputation keeps the inputs of layers and the results of single operations, whether the
    # layers are compiled or not.
    return setup.compile and setup.checkpointing in ("none", "gathers")


def fits_share(tensors: int, reserve: Mapping[str, int], device_bytes: int) -> float | None:
    """Share of the published allocators with which the peak fits, 0 to 1; None for a CPU."""
    if not reserve or not tensors:
        return None
    free = device_bytes - reserve["communication"] - sum(CONTEXTS) / 2
    slack = free / tensors - 1
    if slack >= SLACK_DECILES[-1]:
        return 1.0
    steps = list(itertools.pairwise(SLACK_DECILES))
    passed = sum(min(max((slack - low) / (high - low), 0.0), 1.0) for low, high in steps)
    return round(passed / len(steps), 2)

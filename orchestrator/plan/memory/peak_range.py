"""How far the peak memory of a rank may be off."""

from collections.abc import Mapping

from orchestrator.plan.memory.reserve import CONTEXT_BYTES, MIB

TRACED = (0.997, 1.002)
"""10th and 90th percentile of traced tensors, relative to planned ones: the 68 cells of
`benchmarks/results/memory.md`."""
SLACKS = (0.023, 0.066)
"""10th and 90th percentile of what torch's caching allocator holds in addition to tensors: the
fullest rank of 43 runs on B200 (`benchmarks/published/kernels/allocator.csv`)."""
CONTEXTS = (CONTEXT_BYTES, 760 * MIB)
"""Memory of a process beside the allocator: the assumed context, and what a rank took on an H200
(`benchmarks/results/gpu.md`)."""
BASIS = "68 traced steps of the trainer, and the allocators of 43 published runs"


def peak_range(tensors: int, reserve: Mapping[str, int]) -> tuple[int, int]:
    """The 10th and 90th percentile of the peak; `reserve` is empty for a CPU."""
    low, high = (
        tensors * traced * (1 + (slack if reserve else 0.0))
        + reserve.get("communication", 0)
        + (context if reserve else 0)
        for traced, slack, context in zip(TRACED, SLACKS, CONTEXTS, strict=True)
    )
    return round(low), round(high)

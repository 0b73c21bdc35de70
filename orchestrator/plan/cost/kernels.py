"""The time of single operations on one device."""

import math
from functools import lru_cache

from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.sizes import COMPUTE_BYTES

PARTS = (1, 2, 4, 8)
"""Numbers of parts into which a kernel may split the inner size (split-K), to fill all
processors."""
NARROW, WIDE = 64, 256
"""Head sizes for which the attention kernel was calibrated, in addition to 128."""


@lru_cache(maxsize=16384)
def matmul_s(machine: Machine, rows: int, columns: int, inner: int, kind: str) -> float:
    """Seconds of [rows, inner] x [inner, columns] in type `kind`: the maximum of arithmetic and
    memory time.

    A matrix product is computed in tiles. The last round of tiles leaves processors idle. The fixed
    time to start and to write a tile matters less the larger `inner` is.
    """
    if min(rows, columns, inner) == 0:
        return 0.0
    flops = 2.0 * rows * columns * inner
    calibration = machine.calibration
    arithmetic = flops / (machine.rates[kind] * _filled(machine, rows, columns, inner))
    size = COMPUTE_BYTES[kind]
    moved = size * (rows * inner + inner * columns) + 2 * max(1, size // 2) * rows * columns
    return max(arithmetic, moved / machine.memory_bytes_per_s) + calibration.gap_s


def _filled(machine: Machine, rows: int, columns: int, inner: int) -> float:
    """Utilisation of the processors with the best choice of tiles, 0 to 1."""
    calibration = machine.calibration
    if calibration.processors == 1:
        return inner / (inner + calibration.depth_half)
    best = 0.0
    for tile in calibration.tiles:
        tiles = math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns)
        padded = rows * columns / (tiles * tile.rows * tile.columns)
        for parts in PARTS:
            rounds = tiles * parts / calibration.processors
            depth = inner / parts
            share = tile.speed * padded * depth / (depth + calibration.depth_half)
            share *= rounds / math.ceil(rounds)
            best = max(best, share if parts == 1 else share * calibration.split)
    return best


def least_matmul_s(machine: Machine, flops: float, inner: int, kind: str) -> float:
    """A lower bound of `matmul_s`: all processors are filled with the fastest tiles."""
    if flops == 0:
        return 0.0
    calibration = machine.calibration
    share = machine.fastest_tile * inner / (inner + calibration.depth_half)
    return flops / (machine.rates[kind] * share) + calibration.gap_s


def attention_s(  # noqa: PLR0913 - what the kernel gets, number by number
    machine: Machine,
    scores: float,
    width: int,
    head: int,
    seen: float,
    rows: float,
    kind: str = "bfloat16",
) -> tuple[float, float]:
    """Seconds of attention, forward and backward.

    There are two products forward and five backward, because the scores are recomputed (Dao 2023).
    A processor works on a tile of queries of one head, so few heads of a short sequence leave
    processors idle.

    Args:
        scores: number of (query, key) pairs.
        width: features of all heads together.
        head: features of one head.
        seen: tokens of a sequence that one kernel call gets.
        rows: tokens of this rank.
        kind: type of queries, keys and values.
    """
    kernel, gap = machine.kernel, machine.calibration.gap_s
    speed = seen / (seen + kernel.half)
    if head <= NARROW:
        speed *= kernel.narrow
    elif head >= WIDE:
        speed *= kernel.wide
    forward, backward = machine.attention[kind]
    queries = rows * width / head
    forward *= speed * queries / (queries + kernel.few_forward)
    backward *= speed * queries / (queries + kernel.few_backward)
    flops = 2.0 * scores * width
    return 2 * flops / forward + gap, 5 * flops / backward + gap


def move_s(machine: Machine, size: float, kernels: int = 0) -> float:
    """Seconds to read and write `size` bytes with `kernels` kernels."""
    return size / machine.memory_bytes_per_s + kernels * machine.calibration.gap_s

"""How long single operations take on one device."""

import math
from functools import lru_cache

from orchestrator.plan.cost.machine import Machine
from orchestrator.plan.sizes import COMPUTE_BYTES

PARTS = (1, 2, 4, 8)
"""Into which a kernel may cut the inner size, to have tiles for all processors."""
NARROW, WIDE = 64, 256
"""Heads for which the attention kernel was measured, beside 128."""


@lru_cache(maxsize=16384)
def matmul_s(machine: Machine, rows: int, columns: int, inner: int, kind: str) -> float:
    """[rows, inner] times [inner, columns] in `kind`: the slower of arithmetic and memory.

    Arithmetic in tiles: the last round of tiles leaves processors idle, and a tile has to be begun
    and written out, which matters the less the deeper it is.
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
    """Share of the processors' time that goes into the product, at the best cut into tiles."""
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
    """No more than `matmul_s` takes: as if tiles of the quickest kind filled all processors."""
    if flops == 0:
        return 0.0
    calibration = machine.calibration
    share = machine.quickest_tile * inner / (inner + calibration.depth_half)
    return flops / (machine.rates[kind] * share) + calibration.gap_s


def attention_s(
    machine: Machine, scores: float, width: int, head: int, seen: float
) -> tuple[float, float]:
    """Forward and backward, of `scores` pairs of a query and a key and heads that are `width` wide
    together, `head` each; `seen` is how many tokens a kernel gets of a sequence.

    Two products forward; backward five, the first of which is the scores again (Dao 2023).
    """
    calibration = machine.calibration
    speed = seen / (seen + calibration.attention_half)
    if head <= NARROW:
        speed *= calibration.attention_narrow
    elif head >= WIDE:
        speed *= calibration.attention_wide
    forward, backward = machine.attention
    flops = 2.0 * scores * width / speed
    return 2 * flops / forward + calibration.gap_s, 5 * flops / backward + calibration.gap_s


def move_s(machine: Machine, size: float, kernels: int = 0) -> float:
    """Reading and writing `size` bytes, in so many kernels."""
    return size / machine.memory_bytes_per_s + kernels * machine.calibration.gap_s

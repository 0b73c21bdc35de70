"""The order of samples: a pure function of the seed and the position in the job's stream.

Position p of the stream is sample `p % global_batch` of batch `p // global_batch`. Batch n belongs
to step n unless batches are skipped (`contract/skipped_batches.py`). Each epoch uses each sample
once, in its own pseudo-random order. The order is computed sample by sample and never stored, so it
costs the same for a thousand samples and for a trillion.

Functions take integers, or uint64 arrays to compute many positions at once.
"""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
"""uint64, whose arithmetic wraps around. numpy's stubs lose this type in expressions."""
Number = TypeVar("Number", int, Words)

ROUNDS = 4
WORD = (1 << 64) - 1


def sample_at(position: int, num_samples: int, seed: int) -> int:
    """The sample, in `range(num_samples)`, at `position` of the stream."""
    epoch, offset = divmod(position, num_samples)
    return permute(offset, num_samples, mix(mix(seed) ^ epoch))


def samples_at(positions_N: Words, num_samples: int, seed: int) -> Words:
    """`sample_at` for many positions, a hundred times faster."""
    epoch_N, index_N = np.divmod(positions_N, np.uint64(num_samples))
    key_N = mix(mix(seed) ^ epoch_N)
    half = half_bits(num_samples)
    outside_N = np.arange(len(index_N))
    while len(outside_N):
        index_N[outside_N] = _feistel(index_N[outside_N], half, key_N[outside_N])
        outside_N = outside_N[index_N[outside_N] >= num_samples]
    return index_N


def permute(index: int, size: int, key: int) -> int:
    """The image of `index` under a permutation of `range(size)` that `key` selects."""
    half = half_bits(size)
    while True:
        # A Feistel network permutes a power of four. Repeating it until the value is below `size`
        # (cycle walking) gives a permutation of `size`, in fewer than four rounds on average.
        index = _feistel(index, half, key)
        if index < size:
            return index


def half_bits(size: int) -> int:
    """Half the bits of the smallest power of four that is at least `size`."""
    return max(1, ((size - 1).bit_length() + 1) // 2)


def _feistel(value: Number, half: int, key: Number) -> Number:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (mix((key + turn & WORD) ^ right << 3) & mask)
    return left << half | right


def mix(value: Number) -> Number:
    """splitmix64: spreads every bit of `value` over 64."""
    value = value + 0x9E3779B97F4A7C15 & WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31

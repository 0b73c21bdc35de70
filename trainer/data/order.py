"""Which sample comes when: a pure function of the seed and the position in the job's stream.

Position p of the stream is sample `p % global_batch` of step `p // global_batch`. Each epoch passes
through all samples once, in its own pseudo-random order, computed sample by sample: no list of the
order is ever made, so it costs the same for a thousand samples and for a trillion.
"""

ROUNDS = 4
WORD = (1 << 64) - 1


def sample_at(position: int, num_samples: int, seed: int) -> int:
    """The sample, in `range(num_samples)`, at `position` of the stream."""
    epoch, offset = divmod(position, num_samples)
    return permute(offset, num_samples, mix(mix(seed) ^ epoch))


def permute(index: int, size: int, key: int) -> int:
    """Where a bijection of `range(size)`, chosen by `key`, sends `index`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        # A Feistel network permutes a power of four; walking on until the value is small enough
        # makes it a permutation of `size`, in fewer than four turns on average.
        index = _feistel(index, half, key)
        if index < size:
            return index


def _feistel(value: int, half: int, key: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (mix(key + turn ^ right << 3) & mask)
    return left << half | right


def mix(value: int) -> int:
    """splitmix64: spreads every bit of `value` over 64."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & WORD
    return value ^ value >> 31

"""The sample at a position of the training is a function of the seed and the position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.order import permute, sample_at, samples_at


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_the_order_of_an_epoch_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@given(num_samples=st.integers(1, 500), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 9))
def test_no_sample_repeats_within_an_epoch(num_samples: int, seed: int, epoch: int) -> None:
    begin = epoch * num_samples
    seen = [sample_at(p, num_samples, seed) for p in range(begin, begin + num_samples)]
    assert len(set(seen)) == num_samples


def test_epochs_and_seeds_differ_in_their_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [sample_at(epoch * 100 + p, 100, seed) for p in range(100)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != list(range(100))


@given(
    first=st.integers(0, 2**50),
    num_samples=st.integers(1, 2**40) | st.integers(1, 40),
    seed=st.integers(0, 2**63 - 1),
)
def test_many_positions_at_once_give_the_same_samples(
    first: int, num_samples: int, seed: int
) -> None:
    positions = range(first, first + 20)
    found = samples_at(np.array(positions, dtype=np.uint64), num_samples, seed)
    assert found.tolist() == [sample_at(p, num_samples, seed) for p in positions]


def test_the_order_of_samples_is_the_same_in_every_version() -> None:
    """A run that resumes with a newer version must read its data in the same order."""
    found = [sample_at(p, 1000, 7) for p in (0, 1, 999, 1000, 123456)]
    assert found == [825, 424, 6, 203, 812]

"""The interval that benchmarks print beside a median."""

import random

import pytest

from benchmarks.measure.timing import interval


@pytest.mark.parametrize(
    ("count", "place"),
    # Of 15 values, the median is outside of the 4th and 12th with 2 (1 + 15 + 105 + 455) / 2^15.
    [(6, 0), (8, 0), (9, 1), (12, 2), (15, 3), (20, 5), (30, 9)],
)
def test_the_places_are_those_of_the_sign_test(count: int, place: int) -> None:
    values = random.Random(0).sample(range(1000), count)
    assert interval(values) == (sorted(values)[place], sorted(values)[-1 - place])


def test_the_true_median_is_inside_95_times_of_100() -> None:
    draw = random.Random(1)
    inside = 0
    for _ in range(2000):
        low, high = interval([draw.lognormvariate(0, 1) for _ in range(15)])
        inside += low <= 1 <= high
    assert 0.95 <= inside / 2000 <= 0.98


def test_few_values_give_the_whole_range() -> None:
    assert interval([3.0]) == (3.0, 3.0)
    assert interval([1.0, 4.0, 2.0]) == (1.0, 4.0)

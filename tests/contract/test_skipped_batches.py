"""Windows of skipped batches: which batch each step reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.codec import Invalid
from orchestrator.contract.skipped_batches import (
    Window,
    already_read,
    batch_of,
    from_text,
    merge_windows,
    to_text,
)


def windows(*pairs: tuple[int, int]) -> tuple[Window, ...]:
    return tuple(Window(first=first, last=last) for first, last in pairs)


@pytest.mark.parametrize(
    ("left_out", "batches"),
    [
        ((), [1, 2, 3, 4, 5, 6]),
        (((3, 4),), [1, 2, 5, 6, 7, 8]),
        (((1, 1),), [2, 3, 4, 5, 6, 7]),
        (((5, 5), (2, 3)), [1, 4, 6, 7, 8, 9]),
        (((2, 3), (4, 4)), [1, 5, 6, 7, 8, 9]),
    ],
)
def test_steps_read_the_remaining_batches_in_order(
    left_out: tuple[tuple[int, int], ...], batches: list[int]
) -> None:
    assert [batch_of(step, windows(*left_out)) for step in range(1, 7)] == batches


gaps = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=5)


@given(gaps, st.integers(1, 60))
def test_every_batch_that_is_not_skipped_is_read_once(
    pairs: list[tuple[int, int]], steps: int
) -> None:
    at, left_out = 1, []
    for gap, size in pairs:
        left_out.append((at + gap, at + gap + size - 1))
        at += gap + size
    skipped = {batch for first, last in left_out for batch in range(first, last + 1)}
    read = [batch_of(step, windows(*left_out)) for step in range(1, steps + 1)]
    assert read == [b for b in range(1, read[-1] + 1) if b not in skipped]


@pytest.mark.parametrize(
    ("step", "there", "wanted", "found"),
    [
        (0, [], [(1, 9)], []),
        (40, [], [(41, 52)], []),
        (41, [], [(41, 52)], [(41, 52)]),
        (60, [], [(41, 52)], [(41, 52)]),
        (50, [(41, 52)], [(41, 52)], []),
        (47, [(41, 52)], [(41, 52), (60, 70)], []),
        (48, [(41, 52)], [(41, 52), (60, 70)], [(60, 70)]),
        (41, [(41, 52)], [(41, 57)], [(41, 57)]),
        (40, [(41, 52)], [(41, 57)], []),
    ],
)
def test_windows_that_were_already_read_are_found(
    step: int,
    there: list[tuple[int, int]],
    wanted: list[tuple[int, int]],
    found: list[tuple[int, int]],
) -> None:
    assert already_read(step, windows(*there), windows(*wanted)) == windows(*found)


def test_a_larger_window_replaces_those_inside_it() -> None:
    former = windows((3, 4), (41, 52))
    assert merge_windows(former, windows((41, 57))) == windows((3, 4), (41, 57))
    assert merge_windows(former, former) == former


def test_windows_survive_a_round_trip_through_the_environment() -> None:
    both = windows((3, 4), (41, 52))
    assert from_text(to_text(both), "NDCTL_SKIP") == both
    assert [str(window) for window in windows((3, 4), (7, 7))] == ["3 to 4", "7"]
    with pytest.raises(Invalid, match="last: must be at least first"):
        from_text('[{"first": 3, "last": 2}]', "NDCTL_SKIP")
    with pytest.raises(ValueError, match="Expecting value"):
        from_text("nonsense", "NDCTL_SKIP")

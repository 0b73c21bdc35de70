"""Units of numbers in texts."""

import pytest

from orchestrator.plan.figures import show_bytes, show_durations, show_seconds, show_traffic


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        ((1 << 30) - 1, "1 GiB"),
        (80 << 30, "80 GiB"),
        (1 << 55, "32768 TiB"),
    ],
)
def test_bytes_are_shown_with_a_suitable_unit(count: int, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5e-7, "0.50 us"),
        (0.0125, "12.5 ms"),
        (0.9999, "1,000 ms"),
        (12345.0, "12,345 s"),
    ],
)
def test_seconds_are_shown_with_a_suitable_unit(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1500, "1.50 kB"), (2.5e10, "25.0 GB"), (3e15, "3,000 TB")]
)
def test_bytes_on_a_link_are_shown_in_powers_of_ten(count: float, text: str) -> None:
    assert show_traffic(count) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (44 * 3600, 75 * 3600, "1.83 to 3.12 days"),
        (57 * 60, 90 * 60, "0.95 to 1.50 h"),
        (30, 150, "0.50 to 2.50 min"),
        (0.5, 90, "500 ms to 90.0 s"),
    ],
)
def test_a_range_of_times_has_one_unit(low: float, high: float, text: str) -> None:
    assert show_durations(low, high) == text

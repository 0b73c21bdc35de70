from datetime import UTC
from zoneinfo import ZoneInfo

import pytest

from orchestrator.dashboard import format


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 ms"),
        (0.0214, "21 ms"),
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.9, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (273_600, "3 d 04 h"),
    ],
)
def test_durations_are_shown_with_their_units(seconds: float, said: str) -> None:
    assert format.duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (102, "1:42"), (7510, "2:05:10"), (273_910, "3d 04:05:10")]
)
def test_a_stopwatch_has_a_fixed_format(seconds: float | None, shown: str) -> None:
    assert format.stopwatch(seconds) == shown


def test_times_are_shown_in_the_given_zone() -> None:
    assert format.date_time(0, UTC) == "1970-01-01 00:00:00 UTC"
    assert format.date_time(0, ZoneInfo("Asia/Tokyo")) == "1970-01-01 09:00:00 JST"
    assert format.short_date_time(0, UTC) == "01-01 00:00:00"
    assert len(format.date_time(0, None)) > 20, "this machine's has a name, too"


def test_unknown_numbers_are_shown_as_a_dash() -> None:
    assert (format.loss(None), format.rate(None)) == ("-", "-")


def test_long_lists_of_ranks_are_shortened() -> None:
    assert format.rank_list((3,)) == "rank 3"
    assert format.rank_list(tuple(range(10)), 2) == "ranks 0, 1 and 8 more"


def test_long_lists_of_rank_ranges_are_shortened() -> None:
    assert format.rank_spans([(3, 3)]) == "rank 3"
    assert format.rank_spans([(0, 7), (12, 12)]) == "ranks 0-7, 12"
    assert format.rank_spans([(0, 7), (12, 12), (16, 19)], 1) == "ranks 0-7 and 5 more"


def test_a_size_has_its_unit() -> None:
    assert (format.size(3 << 20), format.size(3 << 30)) == ("3.0 MiB", "3.0 GiB")


def test_facts_within_a_millisecond_count_as_simultaneous() -> None:
    assert format.detection_delay(1e-5) == "detected at once"
    assert format.detection_delay(2.0) == "detected after 2.0 s"

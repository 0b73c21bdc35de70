"""Times in files are Unix seconds. People read date, time and zone, from this one function."""

from datetime import UTC, datetime, tzinfo

LATEST = 1e10
"""In the year 2286. Times derived from it are still valid dates."""


def check_time(at: float) -> None:
    """Raises ValueError if `at` cannot be a time of a job, such as `1e300`, which is no date."""
    if not 0 <= at <= LATEST:
        raise ValueError(f"its time {at:g} is not between 1970 and 2286")


def date_time(at: float, zone: tzinfo | None = UTC) -> str:
    """`2026-01-09 08:05:09 UTC`, in `zone`. None: the time zone of this machine."""
    return f"{_in(at, zone):%Y-%m-%d %H:%M:%S %Z}"


def short_date_time(at: float, zone: tzinfo | None) -> str:
    """Without year and zone, for a screen that shows them in its header."""
    return f"{_in(at, zone):%m-%d %H:%M:%S}"


def _in(at: float, zone: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(at, UTC).astimezone(zone)

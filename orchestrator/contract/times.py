"""Times in files: Unix seconds."""

LATEST = 1e10
"""In the year 2286, so that what is computed from it is a date as well."""


def check_time(at: float) -> None:
    """Raises ValueError where `at` can be no time of ours: a date cannot show `1e300`."""
    if not 0 <= at <= LATEST:
        raise ValueError(f"its time {at:g} is not between 1970 and 2286")

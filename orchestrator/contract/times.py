"""Times in files: Unix seconds."""

LATEST = 1e10
"""In the year 2286. Times derived from it are still valid dates."""


def check_time(at: float) -> None:
    """Raises ValueError if `at` cannot be a time of a job, such as `1e300`, which is no date."""
    if not 0 <= at <= LATEST:
        raise ValueError(f"its time {at:g} is not between 1970 and 2286")

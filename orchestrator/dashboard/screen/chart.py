"""Draws a series of numbers with block characters."""

from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"


def chart(points: Sequence[tuple[int, float]], width: int, height: int) -> list[str]:
    """`height` lines of `width` characters, the highest value on top.

    The lowest value has a visible block too, so that an empty column means no data.

    Args:
        points: (step, value) in ascending steps.
    """
    if not points or width < 1 or height < 1:
        return [" " * width] * height
    values = resample(points, width)
    low, high = min(values), max(values)
    full = height * 8
    span = high - low
    eighths = [1 + round((v - low) / span * (full - 1)) if span else full // 2 for v in values]
    return [
        "".join(BLOCKS[min(8, max(0, filled - row * 8))] for filled in eighths)
        for row in reversed(range(height))
    ]


def resample(points: Sequence[tuple[int, float]], width: int) -> list[float]:
    """One value per column: the mean of its points, or the previous value if it has none."""
    first, last = points[0][0], points[-1][0]
    values: list[float] = []
    place = 0
    for column in range(width):
        end = first + (last - first) * (column + 1) / width
        crowd = []
        while place < len(points) and (points[place][0] <= end or column == width - 1):
            crowd.append(points[place][1])
            place += 1
        if crowd:
            values.append(sum(crowd) / len(crowd))
        else:
            values.append(values[-1] if values else points[0][1])
    return values

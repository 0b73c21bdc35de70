"""Straight lines through measured points."""

from collections.abc import Sequence
from typing import NamedTuple


class Line(NamedTuple):
    slope: float
    start: float
    """At x = 0."""


def fitted(points: Sequence[tuple[float, float]]) -> Line | None:
    """The line through (x, y) with the smallest squares of relative errors, because times of small
    and of large operations differ by factors of thousands. None: the points have one x only."""
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    if not total:
        return None
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if spread <= 1e-12 * total * mean_x**2:
        return None
    common = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = common / spread
    return Line(slope, mean_y - slope * mean_x)

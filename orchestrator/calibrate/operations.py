"""Rates of one device, from samples of products, attention and copies.

The formulas are those of `plan/cost/kernels.py`, solved for their constants.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from orchestrator.calibrate.lines import fitted
from orchestrator.contract.messages.measurements import Sample

MOST_DEPTH, MOST_HALF = 4096.0, 8192.0
PRODUCTS = {"attention forward": 2, "attention backward": 5}
"""Products of attention; the backward pass computes the scores again."""


class Products(NamedTuple):
    rate: float
    """Operations per second of an infinitely deep product."""
    depth_half: float
    """Inner size at which a product is half as fast."""
    best: float
    """Operations per second of the fastest one that was measured."""


class Attention(NamedTuple):
    rate: float
    """Operations per second on infinitely long sequences."""
    half: float
    """Tokens at which it is half as fast."""


def named(samples: Iterable[Sample], what: str, kind: str = "") -> list[Sample]:
    return [one for one in samples if one.what == what and kind in ("", one.kind)]


def products_of(samples: Sequence[Sample], gap_s: float) -> Products | None:
    """None without a sample. A product takes (2 rows columns / rate) (inner + depth_half), and the
    gap before it."""
    if not samples:
        return None
    best = max(flops_of(one) / one.seconds for one in samples)
    points = []
    for one in samples:
        size = one.size
        area = 2.0 * size["rows"] * size["columns"]
        points.append((float(size["inner"]), max(one.seconds - gap_s, 0.1 * one.seconds) / area))
    line = fitted(points)
    if line is None or line.slope <= 0:
        return Products(best, 0.0, best)
    return Products(1 / line.slope, min(max(line.start / line.slope, 0.0), MOST_DEPTH), best)


def flops_of(product: Sample) -> float:
    return 2.0 * product.size["rows"] * product.size["columns"] * product.size["inner"]


def attention_of(samples: Sequence[Sample]) -> Attention | None:
    """Of samples with equal heads. 1 / speed = (1 + half / tokens) / rate."""
    if not samples:
        return None
    points = [(1 / one.size["tokens"], one.seconds / attention_flops(one)) for one in samples]
    line = fitted(points)
    if line is None or line.start <= 0:
        return Attention(max(1 / slowness for _, slowness in points), 0.0)
    return Attention(1 / line.start, min(max(line.slope / line.start, 0.0), MOST_HALF))


def attention_flops(sample: Sample) -> float:
    """Half of all (query, key) pairs, because the mask takes the others away."""
    size = sample.size
    pairs = size["sequences"] * size["tokens"] ** 2 / 2
    return PRODUCTS[sample.what] * 2.0 * pairs * size["heads"] * size["head"]


def bytes_per_s(samples: Sequence[Sample]) -> float | None:
    return min((one.size["bytes"] / one.seconds for one in samples), default=None)

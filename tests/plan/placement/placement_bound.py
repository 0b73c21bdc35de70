"""A lower bound on what any placement of a grid of nodes costs, found without placing one.

For each level of switches two bounds hold, and the greater counts.

By axis: a group of n nodes that is not whole below one switch crosses as often as it has pieces (a
ring), or once less (a chain). Not more than the sum of floor(room / n) groups are whole, and the
others have two pieces or ceil(n / largest room).

By switch: what m nodes of the grid send out. Let the m nodes meet L_a lines along axis a, F_a of
them whole. Then the cut is at least the sum over axes of 2 (chain: 1) times L_a - F_a times what
the axis sends, as a part of a ring has two ends; the product of all L_a is at least m^(d-1)
(Loomis and Whitney, 1949); F_a is m / n_a at most; and if F_a > 0, then L_b is n_a at least for
every other axis b. The least sum under these, g(m), is found for each choice of axes with F_a > 0,
L as real numbers, by water-filling. Over all switches, the least sum of g(m_i) with m_i nodes below
switch i is bounded by Lagrange: for any price p, p N + sum of min over m of (g(m) - p m).
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

STEPS = 24
"""Towards the best price; each leaves two thirds of the range."""

Axis = tuple[int, int, bool]
"""Nodes along it, bytes from a node to the next, whether it is a ring."""


@dataclass(frozen=True)
class Bound:
    axes: tuple[Axis, ...]

    @property
    def nodes(self) -> int:
        return math.prod(size for size, _, _ in self.axes)

    def of_level(self, rooms: Sequence[int]) -> float:
        """Bytes that leave switches with room for so many nodes each."""
        if max(rooms) >= self.nodes:
            return 0.0
        return max(self._by_axis(rooms), self._by_switch(rooms))

    def _by_axis(self, rooms: Sequence[int]) -> float:
        total = 0
        for size, sent, ring in self.axes:
            groups = self.nodes // size
            torn = max(0, groups - sum(room // size for room in rooms))
            pieces = max(2, math.ceil(size / max(rooms)))
            total += torn * sent * (pieces if ring else pieces - 1)
        return total

    def _by_switch(self, rooms: Sequence[int]) -> float:
        most = max(rooms)
        return self._shared([0.0] + [_cut(self.axes, m) for m in range(1, most + 1)], rooms)

    def _shared(self, least: list[float], rooms: Sequence[int]) -> float:
        """The least sum over switches of which m nodes cost `least[m]`, at the best price."""
        counts = Counter(rooms)

        def at(price: float) -> float:
            gains = [value - price * m for m, value in enumerate(least)]
            upto = list(itertools.accumulate(gains, min))
            shares = sum(times * upto[room] for room, times in counts.items())
            return price * self.nodes + shares

        low, high = 0.0, max(value / m for m, value in enumerate(least) if m)
        for _ in range(STEPS):  # it is concave, and any price gives a bound
            third = (high - low) / 3
            if at(low + third) < at(high - third):
                low += third
            else:
                high -= third
        return max(0.0, at((low + high) / 2)) / 2  # each crossing has two ends


@cache
def _cut(axes: tuple[Axis, ...], m: int) -> float:
    """The least that `m` nodes send out."""
    able = [a for a, (size, _, _) in enumerate(axes) if size <= m]
    best = math.inf
    for count in range(len(able) + 1):
        for whole in itertools.combinations(able, count):
            best = min(best, _cut_with(axes, m, whole))
    return best


def _cut_with(axes: tuple[Axis, ...], m: int, whole: tuple[int, ...]) -> float:
    """With whole lines along the axes `whole` and no others; infinite where that cannot be."""
    prices, free, lows = [], [], []
    for a, (size, sent, ring) in enumerate(axes):
        prices.append(sent * (2 if ring else 1))
        free.append(m // size if a in whole else 0)
        low = max([math.ceil(m / size), *(axes[b][0] for b in whole if b != a)])
        if low > m:
            return math.inf
        lows.append(max(low, free[-1]))
    lines = _raised(lows, prices, m ** (len(axes) - 1))
    return sum(p * max(0.0, n - f) for p, n, f in zip(prices, lines, free, strict=True))


def _raised(lows: Sequence[int], prices: Sequence[int], product: int) -> list[float]:
    """The cheapest lines that are at least these and whose product is at least that.

    Those that are raised at all end at the same price x lines.
    """
    held: set[int] = set()
    while len(held) < len(lows):
        up = [a for a in range(len(lows)) if a not in held]
        left = product / math.prod(lows[a] for a in held)
        level = (left * math.prod(prices[a] for a in up)) ** (1 / len(up))
        above = {a for a in up if lows[a] > level / prices[a]}
        if not above:
            return [float(low) if a in held else level / prices[a] for a, low in enumerate(lows)]
        held |= above
    return list(map(float, lows))

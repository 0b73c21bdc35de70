"""A lower bound on the cost of every placement of a grid of nodes, computed without placing one.

These bounds hold for each level of switches. The greatest of them is used.

By axis: a group of n nodes in k > 1 pieces below different switches crosses k times (a ring) or
k - 1 times (a chain). At most sum of floor(room / n) groups are in one piece. The other groups have
at least two pieces, and at least ceil(n / largest room).

By switch: the bytes that m nodes of the grid send to other nodes. Let the m nodes meet L_a lines
along axis a, and contain F_a of these lines completely. Then:
  - The cut is at least the sum over axes of 2 (chain: 1) * (L_a - F_a) * bytes of the axis, because
  a
    part of a ring has two ends.
  - L_a is at most m. The product of all L_a is at least m^(d-1) (Loomis and Whitney, 1949).
  - F_a is at most m / n_a. If F_a > 0, then L_b is at least n_a for every other axis b.
The least sum under these constraints is g(m). It is computed for each choice of axes with F_a > 0:
for small m by trying all integers L, otherwise for real L by bisection. Over all switches, the
least sum of g(m_i) with m_i nodes below switch i has this Lagrange bound for any price p: p N + sum
of min over m of (g(m) - p m).

Chains can also be counted differently: a chain in k pieces crosses k - 1 times. Then g has 2 L_a
for chains, complete or not, and 2 per chain is subtracted from the sum. The greater result is used.

Finally, a quarter of the bytes of the heaviest axis may be counted by axis, and the rest by switch.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul

STEPS = 24
"""Steps of the search for the best price. Each keeps two thirds of the range."""
SMALL = 16
"""Up to this number of nodes, L are integers."""
FEW = 100
"""Up to this number of nodes, every distribution over switches is tried."""
HALVINGS = 20
"""Steps of the bisection for real L. Each halves the range of the logarithm."""

Axis = tuple[int, int, bool]
"""(nodes along the axis, bytes from a node to the next, whether it is a ring)"""
Lines = tuple[int, int, bool]
"""(nodes along the axis, cost of a line that nodes meet, whether complete lines cost nothing)"""


@dataclass(frozen=True)
class Bound:
    axes: tuple[Axis, ...]

    @property
    def nodes(self) -> int:
        return math.prod(size for size, _, _ in self.axes)

    def of_level(self, rooms: Sequence[int]) -> float:
        """Bytes that leave switches. `rooms` has the capacity of each switch in nodes."""
        if max(rooms) >= self.nodes:
            return 0.0
        heavy = max(self.axes, key=lambda axis: axis[1])
        lighter = [(n, s - s // 4 * ((n, s, r) == heavy), r) for n, s, r in self.axes]
        mixed = self._by_axis([(heavy[0], heavy[1] // 4, heavy[2])], rooms)
        mixed += self._by_switch(lighter, rooms)
        return max(self._by_axis(self.axes, rooms), self._by_switch(self.axes, rooms), mixed)

    def _by_axis(self, axes: Sequence[Axis], rooms: Sequence[int]) -> float:
        total = 0
        for size, sent, ring in axes:
            groups = self.nodes // size
            torn = max(0, groups - sum(room // size for room in rooms))
            pieces = max(2, math.ceil(size / max(rooms)))
            total += torn * sent * (pieces if ring else pieces - 1)
        return total

    def _by_switch(self, axes: Sequence[Axis], rooms: Sequence[int]) -> float:
        ends = tuple((size, sent * (2 if ring else 1), True) for size, sent, ring in axes)
        pieces = tuple((size, sent * 2, ring) for size, sent, ring in axes)
        chains = sum(self.nodes // size * sent for size, sent, ring in axes if not ring)
        return max(self._at_least(ends, rooms), self._at_least(pieces, rooms) - chains)

    def _at_least(self, lines: tuple[Lines, ...], rooms: Sequence[int]) -> float:
        return self._shared([0.0] + [_cut(lines, m) for m in range(1, max(rooms) + 1)], rooms)

    def _shared(self, least: list[float], rooms: Sequence[int]) -> float:
        """The least sum over switches if m nodes below a switch cost `least[m]`. For few nodes,
        every distribution is tried. For more nodes, the bound at the best price is used."""
        if self.nodes <= FEW:
            return self._of_few(least, rooms) / 2
        counts = Counter(rooms)

        def at(price: float) -> float:
            gains = [value - price * m for m, value in enumerate(least)]
            upto = list(itertools.accumulate(gains, min))
            shares = sum(times * upto[room] for room, times in counts.items())
            return price * self.nodes + shares

        low, high = 0.0, max(value / m for m, value in enumerate(least) if m)
        for _ in range(STEPS):  # The function is concave, and every price gives a bound.
            third = (high - low) / 3
            if at(low + third) < at(high - third):
                low += third
            else:
                high -= third
        return max(0.0, at((low + high) / 2)) / 2  # each crossing has two ends

    def _of_few(self, least: list[float], rooms: Sequence[int]) -> float:
        """Dynamic programming over the number of nodes below the switches so far."""
        sums = [0.0] + [math.inf] * self.nodes
        for room in rooms:
            sums = [
                min(sums[n - m] + least[m] for m in range(min(room, n) + 1))
                for n in range(self.nodes + 1)
            ]
        return sums[-1]


@cache
def _cut(axes: tuple[Lines, ...], m: int) -> float:
    """The least bytes that a set of `m` nodes sends to other nodes."""
    able = [a for a, (size, _, spared) in enumerate(axes) if size <= m and spared]
    best = math.inf
    for count in range(len(able) + 1):
        for whole in itertools.combinations(able, count):
            best = min(best, _cut_with(axes, m, whole))
    return best


def _cut_with(axes: tuple[Lines, ...], m: int, whole: tuple[int, ...]) -> float:
    """The same if exactly the axes `whole` have complete lines, which cost nothing. Infinite if
    that is impossible."""
    lows = []
    for a, (size, _, _) in enumerate(axes):
        lows.append(max([math.ceil(m / size), *(axes[b][0] for b in whole if b != a)]))
        if lows[-1] > m:
            return math.inf
    prices = [price for _, price, _ in axes]
    free = sum(prices[a] * (m // axes[a][0]) for a in whole)
    least = _by_trying if m <= SMALL else _by_bisection
    return max(0.0, least(lows, prices, m) - free)


def _by_trying(lows: Sequence[int], prices: Sequence[int], m: int) -> float:
    """The least cost of lines between `lows` and m whose product is at least m^(d-1)."""
    best = math.inf
    for lines in itertools.product(*(range(low, m + 1) for low in lows[:-1])):
        last = max(lows[-1], -(-(m ** (len(lows) - 1)) // math.prod(lines)))
        if last <= m:
            best = min(best, sum(map(mul, prices, (*lines, last))))
    return best


def _by_bisection(lows: Sequence[int], prices: Sequence[int], m: int) -> float:
    """The same for real numbers. All lines between the limits have the same cost."""

    def lines(level: float) -> list[float]:
        return [min(m, max(low, level / p)) for low, p in zip(lows, prices, strict=True)]

    low, high = float(min(prices)), float(m * max(prices))
    for _ in range(HALVINGS):
        level = math.sqrt(low * high)
        if math.prod(lines(level)) < m ** (len(lows) - 1):
            low = level
        else:
            high = level
    return sum(p * n for p, n in zip(prices, lines(low), strict=True))

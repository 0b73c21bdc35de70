"""A lower bound on what any placement of a grid of nodes costs, found without placing one.

For each level of switches these bounds hold, and the greatest counts.

By axis: a group of n nodes that is not whole below one switch crosses as often as it has pieces (a
ring), or once less (a chain). Not more than the sum of floor(room / n) groups are whole, and the
others have two pieces or ceil(n / largest room).

By switch: what m nodes of the grid send out. Let the m nodes meet L_a lines along axis a, F_a of
them whole. Then the cut is at least the sum over axes of 2 (chain: 1) times L_a - F_a times what
the axis sends, as a part of a ring has two ends; L_a is m at most; the product of all L_a is at
least m^(d-1) (Loomis and Whitney, 1949); F_a is m / n_a at most; and if F_a > 0, then L_b is n_a
at least for every other axis b. The least sum under these, g(m), is found for each choice of axes
with F_a > 0: of whole numbers L by trying all where m is small, else of real ones by bisection.
Over all switches, the least sum of g(m_i) with m_i nodes below switch i is bounded by Lagrange:
for any price p, p N + sum of min over m of (g(m) - p m).

Chains may be counted in another way: one in k pieces crosses k - 1 times. Then g has 2 L_a for
them, whole or not, and 2 for each chain is taken off the sum. The greater of both ways counts.

And a quarter of what the heaviest axis sends may be counted by axis, and the rest by switch.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul

STEPS = 24
"""Steps of the search for the best price; each leaves two thirds of the range."""
SMALL = 16
"""Up to this number of nodes, L are whole numbers."""
FEW = 100
"""Up to this number of nodes, every distribution over switches is tried."""
HALVINGS = 20
"""Steps of the bisection for real L; each halves the range of the logarithm."""

Axis = tuple[int, int, bool]
"""Nodes along it, bytes from a node to the next, whether it is a ring."""
Lines = tuple[int, int, bool]
"""Nodes along it, what a line that nodes meet costs, whether whole ones cost nothing."""


@dataclass(frozen=True)
class Bound:
    axes: tuple[Axis, ...]

    @property
    def nodes(self) -> int:
        return math.prod(size for size, _, _ in self.axes)

    def of_level(self, rooms: Sequence[int]) -> float:
        """Bytes that leave switches; `rooms` has the number of nodes that each can hold."""
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
        """The least sum over switches, where m nodes below a switch cost `least[m]`. For few nodes
        every distribution is tried; for more, the bound at the best price is used."""
        if self.nodes <= FEW:
            return self._of_few(least, rooms) / 2
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
    """The same with whole lines, which cost nothing, along exactly the axes `whole`; infinite if
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
    """The same for real numbers: all lines between the limits cost the same."""

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

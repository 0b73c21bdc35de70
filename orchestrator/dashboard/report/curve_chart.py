"""A curve over steps as SVG, with checkpoints and restarts on its axis."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from orchestrator.dashboard.screen.chart import Marks
from orchestrator.dashboard.screen.curves import Curve
from orchestrator.plan.page.markup import Markup, element

WIDTH, HEIGHT = 460, 200
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 34
MOST_SAVED = 120
"""More checkpoints than this are not marked one by one."""


class _Scale(Struct, frozen=True):
    first: int
    last: int
    low: float
    high: float

    def x(self, step: int) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def curve_chart(one: Curve, points: Sequence[tuple[int, float]], marks: Marks) -> Markup:
    """`points`: (step, value) in ascending steps, at least one."""
    values = [value for _, value in points]
    scale = _Scale(points[0][0], points[-1][0], min(values), max(values))
    (first, began), (last, ended) = points[0], points[-1]
    said = f"{one.name}: {one.text(began)} at step {first:,}, {one.text(ended)} at step {last:,}"
    return element(
        "figure",
        element(
            "svg",
            element("title", said),
            list(_axis(scale, one)),
            list(_marks(scale, marks)),
            _line(scale, points),
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
        ),
        element("figcaption", said),
    )


def _line(scale: _Scale, points: Sequence[tuple[int, float]]) -> Markup:
    if len(points) == 1:
        ((step, value),) = points
        return element(
            "circle", cx=_short(scale.x(step)), cy=_short(scale.y(value)), r=3, class_="c0"
        )
    there = " ".join(f"{_short(scale.x(s))},{_short(scale.y(v))}" for s, v in points)
    return element("polyline", points=there, class_="curve")


def _axis(scale: _Scale, one: Curve) -> Iterator[Markup]:
    bottom = HEIGHT - BOTTOM
    yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis")
    for value, y in ((scale.high, TOP + 4), (scale.low, bottom)):
        yield element("text", one.text(value), x=LEFT - 6, y=y, text_anchor="end", class_="dim")
        if scale.high == scale.low:
            break
    left, right = f"step {scale.first:,}", f"{scale.last:,}"
    yield element("text", left, x=LEFT, y=HEIGHT - 6, class_="dim")
    yield element("text", right, x=WIDTH - RIGHT, y=HEIGHT - 6, text_anchor="end", class_="dim")


def _marks(scale: _Scale, marks: Marks) -> Iterator[Markup]:
    bottom = HEIGHT - BOTTOM
    saved = [step for step in marks.saved if scale.first <= step <= scale.last]
    for step in saved[:: -(-len(saved) // MOST_SAVED) or 1]:
        x = _short(scale.x(step))
        yield element("line", x1=x, x2=x, y1=bottom, y2=bottom + 6, class_="saved")
    for step in marks.resumed:
        if scale.first <= step <= scale.last:
            x = _short(scale.x(step))
            line = element("title", f"restart: step {step:,} is the first of a new attempt")
            yield element("line", line, x1=x, x2=x, y1=TOP, y2=bottom + 6, class_="limit")


def _short(number: float) -> str:
    return f"{number:.1f}"

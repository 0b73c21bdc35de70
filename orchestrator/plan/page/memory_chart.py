"""Memory of a rank over a step, as stacked areas below the limit of the device."""

from collections.abc import Iterator, Sequence

from orchestrator.plan.figures import show_bytes
from orchestrator.plan.memory.over_step import BACKWARD, FORWARD, LOSS, MemoryOverStep, Sample
from orchestrator.plan.page.markup import Markup, element

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 62, 12, 30, 34
ORDER = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "boundaries",
    "activations",
    "logits",
    "temporary",
    "communication",
    "context",
    "slack",
)
"""From the ground up: what stays during a step first, except for what torch does not see."""
PHASES = ((0.0, "forward"), (FORWARD, "loss"), (LOSS, "backward"), (BACKWARD, "update"))
MARGIN = 1.06
SMALL = 4
"""If a device has more than so many times the peak, the chart is scaled to the peak."""
READABLE = 0.7
"""A chart is not drawn smaller than this share of its width, so that its texts can be read. On a
phone it scrolls."""
MARKS = 4
"""Lines of the scale."""


def colour_of(item: str) -> str:
    return f"c{ORDER.index(item) if item in ORDER else len(ORDER) - 1}"


def memory_chart(one: MemoryOverStep, label: str, width: int) -> Markup:
    """`width`: in the units of its texts, which are 12 high."""
    scale = _Scale(one, width)
    peak = max(one.samples, key=lambda sample: sample.total)
    said = f"{label}: memory over a step, at most {show_bytes(peak.total)}"
    return element(
        "figure",
        element(
            "svg",
            element("title", said),
            _grid(scale),
            [_area(scale, one.samples, item) for item in scale.items],
            _limit(scale),
            _peak(scale, peak),
            _hovers(scale, one.samples),
            viewBox=f"0 0 {width} {HEIGHT}",
            style=f"min-width: {READABLE * width:.0f}px",
            role="img",
        ),
        element("figcaption", f"{label}: {_caption(one, peak)}"),
    )


class _Scale:
    def __init__(self, one: MemoryOverStep, width: int) -> None:
        self.width = width
        most = max(sample.total for sample in one.samples)
        limit = one.memory.device_bytes
        self.limit = None if limit is None or limit > SMALL * most else limit
        self.top = max(self.limit or 0, most) * MARGIN
        found = {item for sample in one.samples for item in sample.items}
        self.items = [item for item in ORDER if item in found]

    def x(self, share: float) -> float:
        return round(LEFT + share * (self.width - LEFT - RIGHT), 1)

    def y(self, size: float) -> float:
        return round(TOP + (1 - size / self.top) * (HEIGHT - TOP - BOTTOM), 1)


def _grid(scale: _Scale) -> Iterator[Markup]:
    ground, right = scale.y(0), scale.x(1)
    for mark in range(MARKS + 1):
        size = scale.top / MARGIN * mark / MARKS
        y = scale.y(size)
        yield element("line", x1=LEFT, x2=right, y1=y, y2=y, class_="axis")
        yield element("text", show_bytes(round(size)), x=LEFT - 6, y=y + 4, text_anchor="end")
    ends = [*(start for start, _ in PHASES[1:]), 1.0]
    for (start, name), end in zip(PHASES, ends, strict=True):
        x = scale.x(start)
        yield element("line", x1=x, x2=x, y1=TOP, y2=ground + 5, class_="axis")
        middle = scale.x((start + end) / 2)
        yield element("text", name, x=middle, y=ground + 20, text_anchor="middle")


def _area(scale: _Scale, samples: Sequence[Sample], item: str) -> Markup:
    below = scale.items[: scale.items.index(item)]
    lower = [sum(sample.items.get(one, 0) for one in below) for sample in samples]
    upper = [low + sample.items.get(item, 0) for low, sample in zip(lower, samples, strict=True)]
    points = [
        *(f"{scale.x(one.at)},{scale.y(y)}" for one, y in zip(samples, upper, strict=True)),
        *(
            f"{scale.x(s.at)},{scale.y(y)}"
            for s, y in reversed([*zip(samples, lower, strict=True)])
        ),
    ]
    return element("polygon", points=" ".join(points), class_=f"area {colour_of(item)}")


def _limit(scale: _Scale) -> Iterator[Markup]:
    limit = scale.limit
    if limit is None:
        return
    y = scale.y(limit)
    yield element("line", x1=LEFT, x2=scale.x(1), y1=y, y2=y, class_="limit")
    said = f"a device has {show_bytes(limit)}"
    yield element("text", said, x=scale.x(1), y=y - 6, text_anchor="end", class_="over")


def _peak(scale: _Scale, peak: Sample) -> Iterator[Markup]:
    x, y = scale.x(peak.at), scale.y(peak.total)
    yield element("circle", cx=x, cy=y, r=4, class_="over")
    anchor, beside = ("start", 8) if peak.at < 0.6 else ("end", -8)
    said = f"peak {show_bytes(peak.total)}"
    yield element("text", said, x=x + beside, y=max(12.0, y - 6), text_anchor=anchor)


def _hovers(scale: _Scale, samples: Sequence[Sample]) -> Iterator[Markup]:
    """A strip for each moment, with its sizes as the tooltip."""
    for before, one, after in zip(
        (samples[0], *samples), samples, (*samples[1:], samples[-1]), strict=False
    ):
        left, right = scale.x((before.at + one.at) / 2), scale.x((one.at + after.at) / 2)
        sizes = ", ".join(f"{item} {show_bytes(size)}" for item, size in one.items.items())
        title = element("title", f"{one.when}: {show_bytes(one.total)} ({sizes})")
        place = {"x": left, "y": TOP, "width": round(max(1.0, right - left), 1)}
        yield element("rect", title, **place, height=HEIGHT - TOP - BOTTOM, class_="hover")


def _caption(one: MemoryOverStep, peak: Sample) -> str:
    spread = one.memory.peak_bytes_range
    ranged = "" if spread is None else f" ({show_bytes(spread[0])} to {show_bytes(spread[1])})"
    limit = one.memory.device_bytes
    of = "" if limit is None else f" of {show_bytes(limit)}"
    return f"peak {show_bytes(peak.total)}{of}{ranged}, {peak.when}"


def legend(memories: Sequence[MemoryOverStep]) -> Markup:
    """Each item with its largest size."""
    most: dict[str, int] = {}
    for one in memories:
        for sample in one.samples:
            for item, size in sample.items.items():
                most[item] = max(most.get(item, 0), size)
    return element(
        "ul",
        [
            element(
                "li",
                element("span", class_=f"swatch {colour_of(item)}"),
                f"{item} {show_bytes(most[item])}",
            )
            for item in ORDER
            if item in most
        ],
        class_="legend",
    )

"""The curves of a job: which figures of its metrics are drawn, with restarts and checkpoints."""

from collections.abc import Callable, Sequence

from msgspec import Struct
from rich.text import Text

from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.metrics import Metric
from orchestrator.dashboard.screen.chart import Marks, graph, legend
from orchestrator.dashboard.screen.rows import Row, Section, plain
from orchestrator.dashboard.theme import DIM, title


class Curve(Struct, frozen=True, kw_only=True):
    name: str
    value: Callable[[Metric], float | None]
    text: Callable[[float], str]


def _field(name: str) -> Callable[[Metric], float | None]:
    return lambda metric: getattr(metric, name)


def _data_share(metric: Metric) -> float | None:
    return None if metric.data_s is None or not metric.step_s else metric.data_s / metric.step_s


def _pause(metric: Metric) -> float | None:
    return metric.checkpoint_s or None


CURVES: Sequence[Curve] = (
    Curve(name="loss", value=_field("loss"), text=format.loss),
    Curve(name="tokens/s", value=_field("tokens_per_second"), text=lambda v: f"{v:,.0f}"),
    Curve(name="step time", value=_field("step_s"), text=format.duration),
    Curve(name="MFU", value=_field("mfu"), text=lambda v: f"{v:.1%}"),
    Curve(name="data wait", value=_data_share, text=lambda v: f"{v:.1%}"),
    Curve(name="checkpoint pause", value=_pause, text=format.duration),
    Curve(name="peak memory", value=_field("peak_memory_bytes"), text=format.size),
    Curve(name="GPU busy", value=_field("gpu_utilization"), text=lambda v: f"{v:.0%}"),
    Curve(name="GPU temperature", value=_field("gpu_temperature_c"), text=lambda v: f"{v:.0f} °C"),
    Curve(name="GPU power", value=_field("gpu_power_w"), text=lambda v: f"{v:.0f} W"),
    Curve(name="gradient norm", value=_field("grad_norm"), text=lambda v: f"{v:.3g}"),
    Curve(name="learning rate", value=_field("lr"), text=lambda v: f"{v:.3g}"),
)
"""The most telling first. Figures of one rank are those of rank 0."""


def points_of(view: View, one: Curve) -> list[tuple[int, float]]:
    found = ((metric.step, one.value(metric)) for metric in view.samples)
    return [(step, value) for step, value in found if value is not None]


def telling(view: View) -> list[Curve]:
    """The curves that a job has and that are not flat; loss and throughput in any case."""
    found = []
    for number, one in enumerate(CURVES):
        values = [value for _, value in points_of(view, one)]
        if values and (number < 2 or one.text(min(values)) != one.text(max(values))):
            found.append(one)
    return found


def curve(view: View, one: Curve, width: int, *, min_lines: int, priority: int) -> Section:
    """A chart with a title; empty if the job has no such figure."""
    points = points_of(view, one)
    marks = Marks(saved=view.saved_steps, resumed=view.resumed_steps)

    def lines(height: int) -> list[Row]:
        values = [value for _, value in points]
        ends = one.text(max(values)), one.text(min(values))
        return plain(
            [
                title(one.name, _info(one, points, marks, width - len(one.name) - 8), width),
                *graph(points, ends, marks, width, height - 1),
            ]
        )

    if not points:
        return Section(min_lines=0, max_lines=0, priority=9, draw=lines)
    return Section(min_lines=min_lines, max_lines=max(13, min_lines), priority=priority, draw=lines)


def _info(one: Curve, points: Sequence[tuple[int, float]], marks: Marks, width: int) -> Text:
    """The first and last value, and what the signs on the axis mean, if there is room."""
    (first, began), (last, ended) = points[0], points[-1]
    text = f"{one.text(began)} at step {first:,}, {one.text(ended)} at step {last:,}"
    signs = legend(points, marks)
    ways = [f"{text}   {signs}" if signs else text, text, f"{one.text(began)} → {one.text(ended)}"]
    return Text(next((way for way in ways if format.cells(way) <= width), ways[-1]), style=DIM)

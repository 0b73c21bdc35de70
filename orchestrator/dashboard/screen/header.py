"""The first lines of a job's screen: state, progress, numbers, and what is wrong."""

from collections.abc import Iterator
from datetime import tzinfo

from rich.text import Text

from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.metrics import Metric
from orchestrator.dashboard.theme import BOLD, DIM, STATES, badge, bar, join_parts, left_and_right
from orchestrator.job.stage import ENDED

MIN_BAR = 6
MOST_NUMBERS = 3
"""Lines of numbers."""


def header(view: View, width: int, zone: tzinfo | None) -> list[Text]:
    attempt = f"attempt {view.attempt}" if view.attempt else ""
    restarts = format.count(view.restarts, "restart") if view.restarts else ""
    stage = "" if view.state in ENDED else view.stage
    if view.as_of is not None:
        stage = f"{format.duration(view.now - view.as_of)} ago"
    return [
        _first_line(view, [stage, attempt, restarts], width, zone),
        _progress(view, width),
        *_numbers(view, width),
        *_reason(view, width),
        *_short(view, zone),
    ]


def _first_line(view: View, parts: list[str], width: int, zone: tzinfo | None) -> Text:
    """On a narrow screen the date goes first, then the numbers of restarts and of the attempt."""
    name = Text(view.name, style=BOLD)
    name.truncate(max(8, width // 2 - 4), overflow="ellipsis")
    clock = format.date_time(view.now, zone)
    short = f"{clock.split()[1]} "
    ways = [(parts, f"{clock} "), (parts, short), (parts[:2], short), (parts[:1], short)]
    for told, time in ways:
        left = Text.assemble(" ", name, "  ", badge(view.state), f"   {join_parts(told)}")
        if left.cell_len + 2 + len(time) <= width:
            break
    left.stylize(DIM, 3 + name.cell_len + badge(view.state).cell_len)
    return left_and_right(left, Text(time, style=DIM), width)


def _progress(view: View, width: int) -> Text:
    if not view.steps:  # the user's own program, whose number of steps is unknown
        times = f"   elapsed {format.stopwatch(view.elapsed_s)}"
        step = f" step {view.step:,} " if view.step else " no step reported "
        return Text.assemble((step, BOLD), times)
    percent = 100 * view.step // view.steps if view.steps else 0
    times = f"   elapsed {format.stopwatch(view.elapsed_s)}{_eta(view)}"
    left, right = f" step {format.of_steps(view.step, view.steps)} ", f" {percent:>3}%{times} "
    if len(left) + len(right) + MIN_BAR > width:
        right = f" {percent:>3}% "
    room = max(0, width - len(left) - len(right))
    return Text.assemble((left, BOLD), bar(view.step, view.steps, room), right)


def _eta(view: View) -> str:
    if view.eta_s is None:
        return ""
    later = "" if view.state == "RUNNING" else " once it trains"
    return f"   eta {format.stopwatch(view.eta_s)}{later}"


def _numbers(view: View, width: int) -> list[Text]:
    """Lines of numbers, broken between two of them."""
    lines = [""]
    for part in [part for part in _parts(view) if part]:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if lines[-1] and len(longer) + 1 > width and len(lines) < MOST_NUMBERS:
            lines.append(part)
        else:
            lines[-1] = longer
    return [Text(f" {line}") for line in lines]


def _parts(view: View) -> Iterator[str]:
    if view.loss is not None:
        yield f"loss {format.loss(view.loss)}"
    if view.tokens_per_second is not None:
        yield format.rate(view.tokens_per_second)
    if view.step_s is not None:
        yield f"{view.step_s:.2f} s/step"
    if view.late_s is not None:
        yield f"last step {format.duration(view.late_s)} ago"
    if view.last is not None:
        yield from _of_rank_0(view, view.last)
    if (pause := _last_pause(view)) is not None:
        yield f"checkpoint pause {format.duration(pause)}"
    if view.time is not None and view.time.effective_s:
        yield f"effective {view.time.ratio:.1%}"
    yield view.split
    yield view.backend


def _of_rank_0(view: View, last: Metric) -> Iterator[str]:
    if last.mfu is not None:
        yield f"MFU {last.mfu:.1%}"
    yield from format.use(view.peak_memory_bytes, view.gpu_utilization)
    if last.gpu_temperature_c is not None:
        yield f"{last.gpu_temperature_c:.0f} °C"
    if last.gpu_power_w is not None:
        yield f"{last.gpu_power_w:.0f} W"
    if last.data_s is not None and last.step_s:
        yield f"data wait {last.data_s / last.step_s:.1%}"


def _last_pause(view: View) -> float | None:
    """Seconds for which the newest save paused training, if the metrics here have it."""
    return next((one.checkpoint_s for one in reversed(view.samples) if one.checkpoint_s), None)


def _reason(view: View, width: int) -> list[Text]:
    """The reason of the job's state if it is not obvious, and the fix."""
    if view.as_of is None and (view.state == "RUNNING" or view.reason in view.stage):
        return []
    style = STATES[view.state][1]
    wrapped = format.wrapped(format.one_line(view.reason), max(10, width - 2), max_lines=3)
    lines = [Text(f" {part}", style=style) for part in wrapped]
    typed = format.wrapped(view.fix, max(10, width - 6), break_on_hyphens=False)
    marks = [" fix: ", *["      "] * len(typed)]
    return lines + [
        Text.assemble(mark, (part, BOLD)) for mark, part in zip(marks, typed, strict=False)
    ]


def _short(view: View, zone: tzinfo | None) -> list[Text]:
    if view.gives_back_at is None:
        return []
    due = format.date_time(max(view.gives_back_at, view.now), zone)
    return [
        Text.assemble(
            f" if no hosts arrive, ndctl releases all hosts at {due}; to give up: ",
            (view.commands.of("cancel"), BOLD),
        )
    ]

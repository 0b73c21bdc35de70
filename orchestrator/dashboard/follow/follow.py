"""What `submit --follow` prints: `tell` says it in plain lines, `Follower` puts it on a console.

The caller drives: it hands over new entries and metrics, and this writes. Time is taken from what
is handed over, so nothing here asks a clock.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from orchestrator.contract.messages.events import (
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    DrillHappened,
    HangOver,
    StragglerFound,
    StragglerGone,
    TrainingResumed,
)
from orchestrator.contract.visible import visible
from orchestrator.dashboard import format
from orchestrator.dashboard.event_text import event_words
from orchestrator.dashboard.metrics import NOTHING, Metric, Progress, fold_metrics
from orchestrator.dashboard.next_steps import look_at, next_step
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.status import did, row, state_lines, times
from orchestrator.dashboard.view import View
from orchestrator.job.hosts.host_pool import gives_back_at, is_short, usable
from orchestrator.job.incident import Incident
from orchestrator.job.stage import Diagnosing, Ended
from orchestrator.job.state import Run
from orchestrator.job.step import step
from orchestrator.journal.journal import Entry

TOLD_PARTS = 10
"""A progress line for each tenth of the steps …"""
TOLD_EVERY_S = 60.0
"""… and for each minute."""
TOLD_EVENTS = (
    TrainingResumed,
    CheckpointSaved,
    CheckpointFailed,
    CheckpointIntervalChanged,
    DrillHappened,
    StragglerFound,
    StragglerGone,
    HangOver,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """How far the story has been told."""

    run: Run = field(default_factory=Run)
    progress: Progress = NOTHING
    told_step: int = 0
    told_at: float = 0.0


def tell(told: Told, entry: Entry, zone: tzinfo | None) -> tuple[Told, list[str]]:
    """What a person wants to hear of `entry`: attempts, incidents, recoveries, the end."""
    before = told.run
    after, _ = step(before, entry.event)
    news = list(_news(before, after, entry, zone))
    at = format.moment(entry.event.at, zone)
    fresh = after.attempt.number != before.attempt.number
    place = after.progress.saved if fresh else told.told_step
    return replace(told, run=after, told_step=place), [f"{at}  {format.one_line(n)}" for n in news]


def _news(before: Run, after: Run, entry: Entry, zone: tzinfo | None) -> Iterator[str]:
    if isinstance(entry.event, TOLD_EVENTS):
        yield event_words(entry.event)
    if isinstance(after.stage, Diagnosing) and not isinstance(before.stage, Diagnosing):
        yield f"looking into it: {after.stage.reason}"
    for incident in after.history.incidents[len(before.history.incidents) :]:
        yield from incident_news(incident)
    for old, new in zip(before.history.incidents, after.history.incidents, strict=False):
        if old.recovered_after_s is None and new.recovered_after_s is not None:
            took = format.duration(new.recovered_after_s)
            trains = f"attempt {after.attempt.number} trains"
            yield f"recovered from incident {new.id} after {took}: {trains}"
    if after.attempt.number and is_short(after) and not is_short(before):
        yield _short(after, zone)
    if after.attempt.number != before.attempt.number:
        yield f"starting {after.stage.reason}"
    if isinstance(after.stage, Ended) and not isinstance(before.stage, Ended):
        yield f"{after.state}: {format.why_and_fix(after.stage.reason)[0]}"


def _short(run: Run, zone: tzinfo | None) -> str:
    there, want = len(usable(run)), format.count(len(run.plan.hosts), "host")
    due_at = gives_back_at(run)
    assert due_at is not None
    due = format.moment(due_at, zone)
    return f"waits for hosts: {there} of {want} are there; in vain until {due} all are given back"


def incident_news(incident: Incident) -> Iterator[str]:
    drill = f" (drill {incident.drill})" if incident.drill else ""
    found = format.detected(incident.detected_after_s)
    rule = f" (rule {incident.rule})" if incident.rule else ""
    who = format.blamed(incident.culprit)
    if incident.action == incident.cause:  # the job ends by it, and says so in its own line
        yield f"incident {incident.id}, {incident.kind}{drill}: {who}, {found}; stops the job{rule}"
        return
    yield f"incident {incident.id}, {incident.kind}{drill}: {incident.cause}"
    yield f"  {who}, {found}; {incident.action}{rule}"


def tell_metric(told: Told, metric: Metric, zone: tzinfo | None) -> tuple[Told, list[str]]:
    """A line now and then: each tenth of the steps, each minute, and the first of each attempt."""
    job, last = told.run.job, told.progress.last
    progress = fold_metrics(told.progress, (metric,))
    told = replace(told, progress=progress)
    steps = job.steps if job else 0
    at = metric.time or 0.0
    tenth = max(1, steps // TOLD_PARTS)
    due = (
        metric.step >= steps
        or last is None
        or last.attempt != metric.attempt
        or metric.step // tenth > told.told_step // tenth
        or at - told.told_at >= TOLD_EVERY_S
    )
    if not due:
        return told, []
    told = replace(told, told_step=metric.step, told_at=at)
    return told, [f"{format.moment(at, zone)}  {_progress_words(metric, steps, progress)}"]


def _progress_words(metric: Metric, steps: int, progress: Progress) -> str:
    parts = [f"step {metric.step:,}/{steps:,}", f"loss {format.loss(metric.loss)}"]
    if metric.tokens_per_second is not None:
        parts.append(format.rate(metric.tokens_per_second))
    if progress.step_s is not None and metric.step < steps:
        parts.append(f"eta {format.stopwatch((steps - metric.step) * progress.step_s)}")
    return "  ".join(parts)


class Follower:
    """Prints as it is fed: lines, and where the console is a terminal a bar below them.

    with Follower(console, zone, run) as follower:
        follower.skip(old_entries, old_metrics)  # at --resume: what is known is not told again
        while …:
            follower.feed(tail.more(), metrics.more())
    """

    def __init__(self, console: Console, zone: tzinfo | None, run: Run | None = None) -> None:
        """`run`: what the journal came to at the place from which on it is handed over."""
        self.console = console
        self.zone = zone
        self.told = Told(run=run or Run())
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not console.is_terminal,
            expand=True,
        )
        self.bar: TaskID | None = None

    def skip(self, entries: Sequence[Entry], metrics: Sequence[Metric]) -> None:
        for entry in entries:
            self.told, _ = tell(self.told, entry, self.zone)
        self.told = replace(self.told, progress=fold_metrics(self.told.progress, metrics))

    def feed(self, entries: Sequence[Entry], metrics: Sequence[Metric]) -> None:
        lines: list[str] = []
        for item in in_order(entries, metrics):
            if isinstance(item, Entry):
                self.told, news = tell(self.told, item, self.zone)
                lines += news
            else:
                self.told, news = tell_metric(self.told, item, self.zone)
                lines += [] if self.console.is_terminal else news
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._move_bar()

    def _move_bar(self) -> None:
        run, last = self.told.run, self.told.progress.last
        if run.job is None or not self.console.is_terminal:
            return
        numbers = _bar_words(self.told)
        if self.bar is None:
            self.bar = self.bars.add_task(run.state, total=run.job.steps, numbers=numbers)
        done = last.step if last else 0
        self.bars.update(self.bar, completed=done, description=run.state, numbers=numbers)
        self.bars.refresh()

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.bars.stop()


def _bar_words(told: Told) -> str:
    job, last = told.run.job, told.progress.last
    assert job is not None
    if last is None:
        return f"step 0/{job.steps:,}"
    if told.run.state != "RUNNING":
        return f"step {last.step:,}/{job.steps:,}  loss {format.loss(last.loss)}"
    return _progress_words(last, job.steps, told.progress)


def in_order(entries: Iterable[Entry], metrics: Iterable[Metric]) -> Iterator[Entry | Metric]:
    """Both by their times, each kind in its own order."""
    return heapq.merge(entries, metrics, key=_time)


def _time(item: Entry | Metric) -> float:
    return item.event.at if isinstance(item, Entry) else item.time or 0.0


def summary_text(snapshot: Snapshot, zone: tzinfo | None) -> str:
    """The end of `submit --follow`: what came of the job."""
    run, shown = snapshot.seen.run, snapshot.view
    first, last = snapshot.progress.first, snapshot.progress.last
    lines = state_lines(shown.name, shown.state, shown.reason)
    lines.append(row("steps", f"{shown.step:,} of {shown.steps:,}"))
    if first is not None and last is not None:
        lines.append(row("loss", f"{format.loss(first.loss)} -> {format.loss(last.loss)}"))
        lines.append(row("speed", format.rate(last.tokens_per_second)))
    lines.append(row("wall time", format.duration(shown.elapsed_s)))
    lines.append(row("restarts", str(run.history.restarts)))
    if snapshot.seen.checkpoint.step:
        path = snapshot.checkpoints / snapshot.seen.checkpoint.name
        lines.append(row("checkpoint", str(path)))
    for incident in run.history.incidents:
        lines += _incident_rows(incident, shown, zone)
    if (
        shown.state == "FAILED"
        and run.history.incidents
        and run.history.incidents[-1].evidence.traceback
    ):
        lines += ["", visible(run.history.incidents[-1].evidence.traceback.rstrip()), ""]
    if shown.state != "SUCCEEDED":
        if (command := look_at(snapshot)) is not None:
            lines.append(row("see why", command))
        lines.append(row("next", next_step(snapshot, zone)))
    lines.append(row("more", snapshot.commands.of("describe")))
    return "\n".join(lines)


def _incident_rows(incident: Incident, shown: View, zone: tzinfo | None) -> Iterator[str]:
    drill = f" [drill {incident.drill}]" if incident.drill else ""
    at = format.moment(incident.at, zone)
    label = f"incident {incident.id}"
    known = incident.cause in shown.reason  # which is the first line
    cause = incident.kind if known else f"{incident.kind}: {format.one_line(incident.cause)}"
    yield row(label, f"{at} {cause}{drill}")
    yield row(
        "",
        f"{format.blamed(incident.culprit)}; {times(incident, shown.state)};"
        f" {did(incident, shown.reason)}",
    )

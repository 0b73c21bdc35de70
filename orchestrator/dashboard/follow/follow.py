"""The output of `ndctl submit --follow`: `entry_lines` makes text, `Follower` prints it.

The caller passes new journal entries and metrics to `Follower.feed`. All times come from these, so
this module reads no clock.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from datetime import tzinfo
from types import TracebackType
from typing import Self

from msgspec import Struct, field
from msgspec.structs import replace
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from orchestrator.contract.messages.events import (
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    DrillHappened,
    HangOver,
    HostWarned,
    LogGrew,
    ProgramRuns,
    StragglerFound,
    StragglerGone,
    TrainingResumed,
)
from orchestrator.dashboard import format
from orchestrator.dashboard.console import VisibleConsole, print_report
from orchestrator.dashboard.event_text import describe_event
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.metrics import NO_PROGRESS, Metric, Progress, fold_metrics
from orchestrator.dashboard.next_steps import log_command, next_step
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.status import (
    action_taken,
    progress_steps,
    recovery_text,
    row,
    state_lines,
)
from orchestrator.job.hosts.acquittal import cleared
from orchestrator.job.hosts.host_pool import gives_back_at, is_short
from orchestrator.job.incident import Incident, newly_resumed
from orchestrator.job.stage import Diagnosing, Ended
from orchestrator.job.state import Run, usable
from orchestrator.job.transitions import step
from orchestrator.journal.journal import Entry

PROGRESS_LINES = 10
"""A progress line is printed after each tenth of the steps."""
PROGRESS_INTERVAL_S = 60.0
"""A progress line is printed at least so often."""
PRINTED_EVENTS = (
    TrainingResumed,
    CheckpointSaved,
    CheckpointFailed,
    CheckpointIntervalChanged,
    DrillHappened,
    LogGrew,
    ProgramRuns,
    StragglerFound,
    StragglerGone,
    HostWarned,
    HangOver,
)


class Printed(Struct, frozen=True, kw_only=True):
    """What was printed so far."""

    run: Run = field(default_factory=Run)
    progress: Progress = NO_PROGRESS
    step: int = 0
    """Step of the last progress line."""
    at: float = 0.0
    """Unix time of the last progress line."""


def entry_lines(printed: Printed, entry: Entry, zone: tzinfo | None) -> tuple[Printed, list[str]]:
    """Lines about `entry`, if it starts an attempt, is an incident, a recovery or the end."""
    before = printed.run
    after, _ = step(before, entry.event)
    news = list(_entry_lines(before, after, entry, zone))
    at = format.date_time(entry.event.at, zone)
    # A new attempt goes back to the last checkpoint, and its progress is printed from there.
    last = after.progress.saved if after.attempt.number != before.attempt.number else printed.step
    return replace(printed, run=after, step=last), [f"{at}  {format.one_line(n)}" for n in news]


def _incident_news(before: Run, after: Run) -> Iterator[str]:
    old, new = before.history.incidents, after.history.incidents
    for incident in new[len(old) :]:
        yield from incident_lines(incident)
    for host, why in cleared(before, after):
        yield f"{host} is cleared: {why}"
    for one in newly_resumed(old, new):
        took = format.duration(one.resumed_after_s or 0.0)
        now = f"attempt {after.attempt.number} {one.goes_on}"
        yield f"recovered from incident {one.id} after {took}: {now}"


def _entry_lines(before: Run, after: Run, entry: Entry, zone: tzinfo | None) -> Iterator[str]:
    if isinstance(entry.event, PRINTED_EVENTS):
        yield describe_event(entry.event)
    if isinstance(after.stage, Diagnosing) and not isinstance(before.stage, Diagnosing):
        yield f"collecting evidence: {after.stage.reason}"
    if after.history.incidents is not before.history.incidents:
        yield from _incident_news(before, after)
    if after.attempt.number and is_short(after) and not is_short(before):
        yield _short(after, zone)
    if after.attempt.number != before.attempt.number:
        yield f"starting {after.stage.reason}"
    if isinstance(after.stage, Ended) and not isinstance(before.stage, Ended):
        yield f"{after.state}: {format.split_fix(after.stage.reason)[0]}"


def _short(run: Run, zone: tzinfo | None) -> str:
    there, want = len(usable(run)), format.count(len(run.plan.hosts), "host")
    due_at = gives_back_at(run)
    assert due_at is not None
    due = format.date_time(due_at, zone)
    return (
        f"waiting for hosts: {there} of {want} available; if this does not change, ndctl releases"
        f" all hosts at {due} and requeues the job"
    )


def incident_lines(incident: Incident) -> Iterator[str]:
    drill = f" (drill {incident.drill})" if incident.drill else ""
    found = format.detection_delay(incident.detected_after_s)
    rule = f" (rule {incident.rule})" if incident.rule else ""
    who = format.culprit_text(incident.culprit)
    # An incident that ends the job: the line about the end follows and gives the cause.
    if incident.action == incident.cause:
        yield f"incident {incident.id}, {incident.kind}{drill}: {who}, {found}; stops the job{rule}"
        return
    yield f"incident {incident.id}, {incident.kind}{drill}: {incident.cause}"
    yield f"  {who}, {found}; {incident.decided}{rule}"


def metric_lines(
    printed: Printed, metric: Metric, zone: tzinfo | None
) -> tuple[Printed, list[str]]:
    """A progress line after each tenth of the steps, each minute, and at each attempt's start."""
    job, last = printed.run.job, printed.progress.last
    progress = fold_metrics(printed.progress, (metric,))
    printed = replace(printed, progress=progress)
    steps = job.steps if job else 0
    at = metric.time or 0.0
    tenth = max(1, steps // PROGRESS_LINES)
    due = (
        0 < steps <= metric.step
        or last is None
        or last.attempt != metric.attempt
        or (steps and metric.step // tenth > printed.step // tenth)
        or at - printed.at >= PROGRESS_INTERVAL_S
    )
    if not due:
        return printed, []
    printed = replace(printed, step=metric.step, at=at)
    return printed, [f"{format.date_time(at, zone)}  {_progress_text(metric, steps, progress)}"]


def _progress_text(metric: Metric, steps: int, progress: Progress) -> str:
    parts = [f"step {format.of_steps(metric.step, steps)}{_loss_text(metric)}"]
    if metric.tokens_per_second is not None:
        parts.append(format.rate(metric.tokens_per_second))
    if progress.step_s is not None and metric.step < steps:
        parts.append(f"eta {format.stopwatch((steps - metric.step) * progress.step_s)}")
    return "  ".join(parts)


def _loss_text(metric: Metric) -> str:
    return "" if metric.loss is None else f"  loss {format.loss(metric.loss)}"


class Follower:
    """Prints lines and, on a terminal, a progress bar below them.

    with Follower(console, zone, run) as follower:
        follower.skip(old_entries, old_metrics)  # at --resume: old events are not printed again
        while …:
            follower.feed(tail.more(), metrics.more())
    """

    def __init__(
        self, console: VisibleConsole, zone: tzinfo | None, run: Run | None = None
    ) -> None:
        """`run`: the state of the job before the first entry that is passed."""
        self.console = console
        self.zone = zone
        self.printed = Printed(run=run or Run())
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
            self.printed, _ = entry_lines(self.printed, entry, self.zone)
        self.printed = replace(self.printed, progress=fold_metrics(self.printed.progress, metrics))

    def feed(self, entries: Sequence[Entry], metrics: Sequence[Metric]) -> None:
        lines: list[str] = []
        for item in in_order(entries, metrics):
            if isinstance(item, Entry):
                self.printed, news = entry_lines(self.printed, item, self.zone)
                lines += news
            else:
                self.printed, news = metric_lines(self.printed, item, self.zone)
                lines += [] if self.console.is_terminal else news
        for line in lines:
            print_report(self.console, line)
        self._move_bar()

    def _move_bar(self) -> None:
        run, last = self.printed.run, self.printed.progress.last
        if run.job is None or not self.console.is_terminal:
            return
        numbers = _bar_text(self.printed)
        if self.bar is None:
            self.bar = self.bars.add_task(run.state, total=run.job.steps or None, numbers=numbers)
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


def _bar_text(printed: Printed) -> str:
    job, last = printed.run.job, printed.progress.last
    assert job is not None
    if last is None:
        return f"step {format.of_steps(0, job.steps)}" if job.steps else "no step reported yet"
    if printed.run.state != "RUNNING":
        return f"step {format.of_steps(last.step, job.steps)}{_loss_text(last)}"
    return _progress_text(last, job.steps, printed.progress)


def _speed(progress: Progress) -> str:
    """Tokens per second, or steps per second of a program that does not count tokens."""
    if progress.tokens_per_second is None and progress.step_s:
        return f"{1 / progress.step_s:.3g} steps/s"
    return format.rate(progress.tokens_per_second)


def in_order(entries: Iterable[Entry], metrics: Iterable[Metric]) -> Iterator[Entry | Metric]:
    """Both by their times, each kind in its own order."""
    return heapq.merge(entries, metrics, key=_time)


def _time(item: Entry | Metric) -> float:
    return item.event.at if isinstance(item, Entry) else item.time or 0.0


def summary_text(snapshot: Snapshot, zone: tzinfo | None) -> str:
    """The summary at the end of `submit --follow`."""
    run, shown = snapshot.seen.run, snapshot.view
    first, last = snapshot.progress.first, snapshot.progress.last
    lines = state_lines(shown.name, shown.state, shown.reason)
    lines.append(row("steps", progress_steps(shown).removeprefix("step ")))
    if first is not None and last is not None:
        if last.loss is not None:
            lines.append(row("loss", f"{format.loss(first.loss)} -> {format.loss(last.loss)}"))
        lines.append(row("speed", _speed(snapshot.progress)))
    lines.append(row("wall time", format.duration(shown.elapsed_s)))
    lines.append(row("restarts", str(run.history.restarts)))
    if snapshot.seen.checkpoint.step:
        path = snapshot.checkpoints / snapshot.seen.checkpoint.name
        lines.append(row("checkpoint", str(path)))
    for incident in run.history.incidents:
        lines += _incident_rows(incident, shown, zone)
    if shown.state == "FAILED" and run.history.incidents:
        lines += _traceback(run.history.incidents[-1])
    ended_well = shown.state == "SUCCEEDED"
    if not ended_well and (command := log_command(snapshot)) is not None:
        lines.append(row("see why", command))
    # A program that made no step may have found no GPU, and left with exit code 0.
    if not ended_well or (shown.is_own and not shown.step):
        lines.append(row("next", next_step(snapshot, zone)))
    lines.append(row("more", snapshot.commands.of("describe")))
    return "\n".join(lines)


def _traceback(incident: Incident) -> list[str]:
    """The traceback of the incident, unless it is of a peer of the rank that ended first."""
    found = incident.evidence
    if not found.traceback or found.ended is not None:
        return []
    return ["", *map(format.quoted, found.traceback.rstrip().splitlines()), ""]


def _incident_rows(incident: Incident, shown: View, zone: tzinfo | None) -> Iterator[str]:
    drill = f" [drill {incident.drill}]" if incident.drill else ""
    at = format.date_time(incident.at, zone)
    label = f"incident {incident.id}"
    known = incident.is_told_by(shown.reason)  # the first line already says it
    cause = incident.kind if known else f"{incident.kind}: {format.one_line(incident.cause)}"
    yield row(label, f"{at} {cause}{drill}")
    yield row(
        "",
        f"{format.culprit_text(incident.culprit)}; {recovery_text(incident, shown.state)};"
        f" {action_taken(incident, shown.reason)}",
    )

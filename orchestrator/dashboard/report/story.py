"""What a report says, before it becomes HTML or Markdown. Pure."""

import statistics
import textwrap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import tzinfo
from itertools import accumulate

from msgspec import Struct

from orchestrator.contract.messages.actions import (
    Action,
    EndJob,
    Replan,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import (
    AgentLost,
    CancelRequested,
    CheckpointFailed,
    DrillHappened,
    Event,
    HangDetected,
    HangJudged,
    HostWarned,
    JobSubmitted,
    LeaderStarted,
    RankExited,
    Replanned,
    StragglerFound,
    StragglerGone,
    TrainingResumed,
)
from orchestrator.dashboard import format
from orchestrator.dashboard.describe import incident_rows
from orchestrator.dashboard.event_text import event_time
from orchestrator.dashboard.follow.events import event_lines
from orchestrator.dashboard.job_view.view import View
from orchestrator.dashboard.report.costs import Cost, Price, cost_of, total_of
from orchestrator.dashboard.screen.incidents import sentence, who_text
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.status import progress_steps
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.job.incident import Incident
from orchestrator.job.stage import ENDED
from orchestrator.journal.journal import Entry

BEFORE_S, AFTER_S = 30.0, 5.0
"""The timeline of an incident begins so long before the failure, and ends so long after the first
new step."""
MOST_FIRST, MOST_LAST = 40, 30
"""Lines of a timeline: the first and the last of many."""
MAIN: tuple[type[Event] | type[Action], ...] = (
    JobSubmitted,
    LeaderStarted,
    AgentLost,
    RankExited,
    HangDetected,
    HangJudged,
    DrillHappened,
    StragglerFound,
    StragglerGone,
    HostWarned,
    TrainingResumed,
    CheckpointFailed,
    Replanned,
    CancelRequested,
    StartAttempt,
    StopAttempt,
    Requeue,
    Replan,
    EndJob,
)
"""The timeline of the whole job has the entries with one of these."""


class Timeline:
    """Entries in order; of many, the first and the last."""

    def __init__(self) -> None:
        self.first: list[Entry] = []
        self.last: list[Entry] = []
        self.left_out = 0

    def add(self, entry: Entry) -> None:
        if len(self.first) < MOST_FIRST:
            self.first.append(entry)
            return
        self.last.append(entry)
        if len(self.last) > MOST_LAST:
            self.last.pop(0)
            self.left_out += 1

    def lines(self, zone: tzinfo | None) -> list[str]:
        if not self.left_out:
            return list(event_lines([*self.first, *self.last], zone))
        more = f"… {self.left_out:,} more lines: `ndctl events`"
        return [*event_lines(self.first, zone), more, *event_lines(self.last, zone)]


class Launches:
    """When each launch of the job began and, of all but the newest, when it ended."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.last = 0.0
        """The end of the present launch, if it has ended; else its newest entry."""
        self.ended = False

    def add(self, entry: Entry) -> None:
        at = event_time(entry.event)
        if isinstance(entry.event, JobSubmitted):
            self.ends += [self.last] if self.begins else []
            self.begins.append(at)
            self.last, self.ended = at, False
        # Late news after the end does not make the launch longer.
        if not self.ended:
            self.last = max(self.last, at)
        self.ended = self.ended or any(isinstance(one, EndJob) for one in entry.actions)

    def end_of(self, incident: Incident) -> float | None:
        """When the incident's launch ended; None: it is the newest launch."""
        number = max(0, bisect_right(self.begins, incident.at) - 1)
        return self.ends[number] if number < len(self.ends) else None


class IncidentStory(Struct, frozen=True, kw_only=True):
    incident: Incident
    headline: str
    sentence: str
    rows: Sequence[str]
    """Evidence, decision and its rule, as `ndctl describe` shows them."""
    timeline: Sequence[str]
    cost: Cost


class Report(Struct, frozen=True, kw_only=True):
    view: View
    facts: Sequence[tuple[str, str]]
    """Label and text."""
    stories: Sequence[IncidentStory]
    is_whole: bool
    """It tells of all incidents of the job."""
    timeline: Sequence[str]
    time: TimeSpent
    price: Price | None
    made_at: float
    zone: tzinfo | None

    @property
    def total(self) -> Cost:
        """Of all incidents that are told, at least one."""
        return total_of(one.cost for one in self.stories)


class Told(Struct, frozen=True, kw_only=True):
    """What a report is made of."""

    snapshot: Snapshot
    view: View
    time: TimeSpent
    price: Price | None
    zone: tzinfo | None
    only: int | None = None
    """Number of the one incident to tell; None: all."""

    @property
    def incidents(self) -> Sequence[Incident]:
        known = self.view.incidents
        return known if self.only is None else [one for one in known if one.id == self.only]


def report_of(told: Told, entries: Iterable[Entry]) -> Report:
    """`entries`: the whole journal, which is read once."""
    timelines = {one.id: Timeline() for one in told.incidents}
    windows, whole, launches = _Windows(told), Timeline(), Launches()
    for entry in entries:
        launches.add(entry)
        for incident in windows.around(event_time(entry.event)):
            timelines[incident].add(entry)
        if isinstance(entry.event, MAIN) or any(isinstance(one, MAIN) for one in entry.actions):
            whole.add(entry)
    return Report(
        view=told.view,
        facts=list(_facts(told, launches.begins)),
        stories=[_story(told, one, timelines[one.id], launches) for one in told.incidents],
        is_whole=told.only is None,
        timeline=whole.lines(told.zone),
        time=told.time,
        price=told.price,
        made_at=told.view.now,
        zone=told.zone,
    )


class _Windows:
    """The times of which the timelines of incidents tell."""

    def __init__(self, told: Told) -> None:
        each = sorted(
            (one.at - BEFORE_S, _end(one, told) + AFTER_S, one.id) for one in told.incidents
        )
        self.begins = [begin for begin, _, _ in each]
        self.ends = [(end, number) for _, end, number in each]
        self.latest = list(accumulate((end for end, _ in self.ends), max))
        """The latest end so far."""

    def around(self, at: float) -> Iterator[int]:
        """Numbers of the incidents whose timelines have the time `at`. A journal may have a million
        lines, and a job hundreds of incidents, so few are looked at."""
        for place in range(bisect_right(self.begins, at) - 1, -1, -1):
            if self.latest[place] < at:
                return
            end, number = self.ends[place]
            if at <= end:
                yield number


def _end(incident: Incident, told: Told) -> float:
    resumed = incident.resumed_after_s
    return _until(told) if resumed is None else incident.at + resumed


def _until(told: Told) -> float:
    """The end of the job, or now."""
    standing = told.snapshot.standing
    return standing.since if standing.state in ENDED else told.view.now


def _story(told: Told, incident: Incident, timeline: Timeline, launches: Launches) -> IncidentStory:
    drill = " (drill)" if incident.drill else ""
    at = format.date_time(incident.at, told.zone)
    ended_at = launches.end_of(incident)
    return IncidentStory(
        incident=incident,
        headline=f"#{incident.id} {incident.kind}{drill}: {who_text(incident)}, {at}",
        sentence=sentence(incident, told.view),
        rows=_evidence(incident, told),
        timeline=timeline.lines(told.zone),
        cost=cost_of(
            incident,
            _until(told) if ended_at is None else ended_at,
            _usual_step_s(told.view),
            told.view.mesh.world_size,
            ended=ended_at is not None or told.view.state in ENDED,
        ),
    )


def _evidence(incident: Incident, told: Told) -> list[str]:
    _, *rows = incident_rows(incident, told.snapshot, told.zone)
    return textwrap.dedent("\n".join(rows)).splitlines()


def _usual_step_s(view: View) -> float | None:
    seconds = [one.step_s for one in view.samples if one.step_s]
    return statistics.median(seconds) if seconds else view.step_s


def _facts(told: Told, begins: Sequence[float]) -> Iterator[tuple[str, str]]:
    """`begins`: of all launches."""
    view = told.view
    state = format.split_fix(view.reason)[0]
    yield "state", f"{view.state}, {state}"
    submitted, *later = [format.date_time(at, told.zone) for at in begins]
    yield (
        "submitted",
        f"{submitted}; the newest of {1 + len(later)} launches {later[-1]}" if later else submitted,
    )
    if view.state in ENDED:
        yield "ended", format.date_time(told.snapshot.standing.since, told.zone)
    yield "elapsed", format.duration(told.time.elapsed_s)
    yield "progress", progress_steps(view)
    if view.losses:
        (first, began), (last, ended) = view.losses[0], view.losses[-1]
        yield (
            "loss",
            (f"{format.loss(began)} at step {first:,}, {format.loss(ended)} at step {last:,}"),
        )
    if view.tokens_per_second is not None:
        yield "speed", format.rate(view.tokens_per_second)
    ranks, hosts = format.count(view.mesh.world_size, "rank"), format.count(len(view.hosts), "host")
    yield "where", f"{ranks} on {hosts}, {view.split}, {view.backend}"
    yield "attempts", f"{view.attempt}, {format.count(view.restarts, 'restart')}"
    if told.time.ratio is not None and told.time.effective_s:
        lost = format.lost_time(told.time.lost_s.items())
        yield "effective", f"{told.time.ratio:.1%} of the time{f'; lost: {lost}' if lost else ''}"
    yield "run directory", str(told.snapshot.run_dir.path)


def cost_words(cost: Cost, price: Price | None) -> list[tuple[str, str]]:
    """Label and text of each part of a cost."""
    rows: list[tuple[str, str]] = [(cost.until, format.duration(cost.down_s))]
    if cost.steps is not None:
        repeated = f", {format.duration(cost.repeated_s)}" if cost.repeated_s else ""
        rows.append(("work repeated", f"{format.count(cost.steps, 'step')}{repeated}"))
    if cost.lost is not None:
        rows.append(("work lost", _bound(cost.lost)))
    rows.append(("in all", format.duration(cost.seconds)))
    rows.append(("devices", gpu_hours(cost)))
    if price is not None:
        rows.append(("money", money(cost.gpu_hours, price)))
    return rows


def _bound(steps: int) -> str:
    """As in `status.lost_work`: hosts may have a newer checkpoint in memory."""
    return f"{'at most ' if steps else ''}{format.count(steps, 'step')}"


def gpu_hours(cost: Cost) -> str:
    return f"{cost.gpu_hours:,.3g} GPU-hours on {format.count(cost.gpus, 'device')}"


def money(hours: float, price: Price) -> str:
    paid = hours * price.per_gpu_hour
    return f"{paid:,.2f} at {price.per_gpu_hour:,.4g} a GPU-hour ({price.origin})"


def summary(report: Report) -> str:
    """One or two sentences about all that is told."""
    name = format.one_line(report.view.name)
    if not report.stories:
        share = report.time.ratio
        counts = "" if share is None else f"; {share:.1%} of its time was training that counts"
        now = (
            "; evidence of a failure is being collected"
            if report.view.state == "RECOVERING"
            else ""
        )
        return f"{name} had no incident{counts}{now}."
    many, total = format.count(len(report.stories), "incident"), report.total
    what = many if report.is_whole else f"incident {report.stories[0].incident.id}"
    paid = "" if report.price is None else f", {money(total.gpu_hours, report.price)}"
    so_far = "" if total.is_over else ", and it is not over"
    work = []
    if total.steps is not None:
        were = "was" if total.steps == 1 else "were"
        work.append(f"{format.count(total.steps, 'step')} {were} repeated, ")
    if total.lost is not None:
        work.append(f"{_bound(total.lost)} of work lost, ")
    lost = f"{name} lost {format.duration(total.seconds)} to {what}{so_far}"
    return f"{lost}: {''.join(work)}{gpu_hours(total)}{paid}."

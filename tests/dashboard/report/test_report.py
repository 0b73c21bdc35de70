"""The report of a job: its numbers, its two forms, and hostile text in it."""

import re
import time
from collections.abc import Sequence
from datetime import UTC
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.messages.events import (
    Event,
    LeaderStarted,
    ProgramRuns,
    StepReached,
    TrainingResumed,
)
from orchestrator.dashboard.metrics import Metric
from orchestrator.dashboard.report.costs import (
    MEASURED,
    NOT_MEASURED,
    Price,
    cost_of,
    elsewhere,
    estimated_s,
    total_of,
)
from orchestrator.dashboard.report.html import html_report
from orchestrator.dashboard.report.markdown import markdown_report
from orchestrator.dashboard.report.story import (
    MOST_FIRST,
    MOST_LAST,
    Report,
    Told,
    _Windows,
    cost_words,
    report_of,
    summary,
)
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.plan.page.markup import VOID
from tests.dashboard.dashboard_story import (
    START,
    arrivals,
    broken,
    finished,
    hung,
    journal,
    metrics,
    restarting,
    silent_program,
    started,
    submitted,
)
from tests.dashboard.test_status import snapshot

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SPENT = TimeSpent(elapsed_s=82.0, lost_s={"restart": 7.0, "lost_work": 3.2})
EVIL = "</pre><script>alert(1)</script> \x1b[2J\u202e ```\n# x | y <img src=http://a.b/c>"


def made(
    events: Sequence[Event],
    lines: Sequence[Metric] = (),
    *,
    price: Price | None = None,
    only: int | None = None,
    cause: str | None = None,
    now: float = START + 100,
) -> Report:
    taken = replace(snapshot(events, lines), now=now)
    view = replace(taken.view, saved_steps=(20, 40, 60))
    if cause is not None:
        view = replace(view, incidents=tuple(replace(i, cause=cause) for i in view.incidents))
        history = replace(taken.seen.run.history, incidents=view.incidents)
        seen = replace(taken.seen, run=replace(taken.seen.run, history=history))
        taken = replace(taken, seen=seen)
    told = Told(snapshot=taken, view=view, time=SPENT, price=price, zone=UTC, only=only)
    return report_of(told, journal(events))


KILLED = [*metrics(1, 24), *metrics(21, 60, 2)]


def test_a_report_has_the_steps_seconds_gpu_hours_and_money_of_an_incident() -> None:
    report = made(finished(), KILLED, price=Price(per_gpu_hour=3600.0, origin="--price"))
    (story,) = report.stories
    # Down from START+30 to the first new step at START+37; steps 21 to 24 of 0.8 s again; 4 GPUs.
    assert (story.cost.down_s, story.cost.steps) == (7.0, 4)
    assert story.cost.repeated_s == pytest.approx(3.2)
    assert story.cost.gpu_hours == pytest.approx(4 * 10.2 / 3600)
    text = markdown_report(report)
    assert "quickstart lost 10 s to 1 incident: 4 steps were repeated" in text
    assert "40.80 at 3,600 a GPU-hour (--price)" in text
    assert "rule class-default" in text
    assert "rank 1 on host-0 was killed by SIGKILL" in text


def test_an_incident_that_is_not_over_counts_until_now() -> None:
    report = made(restarting(), metrics(1, 24))
    assert not report.total.is_over
    assert report.stories[0].cost.down_s == 70.0
    assert "lost 1 min 10 s to 1 incident, and it is not over" in markdown_report(report)
    assert "evidence of a failure is being collected" in markdown_report(made(broken()))
    ended = made(finished(), KILLED).stories[0].incident
    unrecovered = replace(ended, recovered_after_s=None)
    later = cost_of(unrecovered, START + 130, 0.8, 4, ended=False)
    assert (later.down_s, later.repeated_s, later.until) == (100.0, 0.0, "so far")
    over = cost_of(unrecovered, START + 130, 0.8, 4, ended=True)
    assert (over.down_s, over.until, over.is_over) == (100.0, "until the job ended", True)


def test_a_program_without_steps_repeats_none_and_has_no_effective_time() -> None:
    never = TimeSpent(elapsed_s=82.0, lost_s={"restart": 82.0})
    report = replace(made(silent_program(), []), time=never)
    assert report.total.steps is None
    assert not re.search(r"repeated|step 0|effective time", html_report(report))
    assert "no step reported yet" in html_report(report)
    runs = ProgramRuns(at=START + 60, attempt=2)
    assert "until all ranks ran again" in html_report(made(silent_program(runs), []))


def test_incidents_before_the_job_trains_again_share_the_time_and_the_steps() -> None:
    (story,) = made(finished(), KILLED).stories
    first = story.cost  # down for 7 s, 4 steps of 0.8 s again
    # 2 s later, recovered at the same time.
    second = replace(first, at=START + 32, down_s=5.0)
    total = total_of([second, first])
    assert (total.down_s, total.steps, total.repeated_s) == (7.0, 4, first.repeated_s)
    later = replace(first, at=START + 60, down_s=5.0, recovered_at=START + 65)
    apart = total_of([first, later])
    assert (apart.down_s, apart.steps) == (12.0, 8)
    still = total_of([first, replace(later, until="so far")])
    assert not still.is_over


def submitted_again(*events: Event) -> list[Event]:
    """Attempt 1 failed at step 24 and ended the job at START + 32; half an hour later a person
    resumed it."""
    again = submitted(at=START + 1832, max_restarts=0, resume=True)
    failed = [submitted(max_restarts=0), *restarting()[1:]]
    launch = replace(again.launch, launch=2)
    return [*failed, replace(again, launch=launch), *events]


def test_the_time_between_two_launches_costs_nothing() -> None:
    resumed: list[Event] = [
        LeaderStarted(at=START + 1833, host="host-0", pid=98),
        *arrivals(("host-0", "host-1"), START + 1834),
    ]
    trains: list[Event] = [
        TrainingResumed(at=START + 1840, attempt=2, step=20),
        StepReached(at=START + 1842, attempt=2, step=21, loss=3.4, tokens_per_second=9100.0),
    ]
    waits, on = (
        made(submitted_again(*resumed, *more), metrics(1, 24), now=START + 1850)
        for more in (list[Event](), trains)
    )
    for report in (waits, on):
        (story,) = report.stories
        assert (story.cost.down_s, story.cost.until) == (2.0, "until the job ended")
        facts = dict(report.facts)
        assert facts["elapsed"] == "1 min 22 s"  # of the account, as in `ndctl status`
        assert facts["submitted"].startswith("2023-11-14 22:13:20 UTC; the newest of 2 launches ")
    # Without a new step no step is repeated.
    assert "lost 2.0 s to 1 incident: at most 4 steps of work lost, " in summary(waits)
    assert ("work lost", "at most 4 steps") in cost_words(waits.stories[0].cost, None)
    assert "lost 5.2 s to 1 incident: 4 steps were repeated, " in summary(on)
    # The next launch fails before its first step: both incidents repeat the same steps.
    first = on.stories[0].cost
    second = replace(first, at=START + 1835, down_s=7.0)
    total = total_of([first, second])
    assert (total.down_s, total.steps) == (9.0, 4)


def test_hundreds_of_incidents_cost_little_for_each_line() -> None:
    (story,) = made(finished(), KILLED).stories
    taken = replace(snapshot(finished(), KILLED), now=START + 1e6)
    many = [replace(story.incident, id=n, at=START + 100 * n) for n in range(1, 2000)]
    view = replace(taken.view, incidents=tuple(many))
    windows = _Windows(Told(snapshot=taken, view=view, time=SPENT, price=None, zone=UTC, only=None))
    for n in (1, 1000, 1999):
        assert list(windows.around(START + 100 * n + 1)) == [n]
    assert list(windows.around(START + 100 * 5 - 40)) == []
    began = time.process_time()
    for n in range(20_000):
        list(windows.around(START + n))
    assert time.process_time() - began < 2.0  # all incidents for each line take ten times as long


def test_a_job_without_incidents_has_a_report_too() -> None:
    report = made(started(), metrics(1, 12))
    assert "quickstart had no incident" in markdown_report(report)
    assert "had no incident" in html_report(report)
    assert "<h2>Curves</h2>" in html_report(report)
    assert "<h2>Curves</h2>" not in html_report(made(started()))


@pytest.mark.parametrize("name", ["measurements.md", "faults.md"])
def test_what_it_took_elsewhere_is_what_was_measured(name: str) -> None:
    text = (RESULTS / name).read_text()
    numbers = {
        ("measurements.md", "torchrun --max-restarts"): "| first new step | 1.6 s (1.3 to 2.0)"
        " | 7.8 s (7.6 to 8.7) |",
        ("measurements.md", "a batch job that requeues itself"): "| to the first new step |"
        " 3.0, 1.8 s | 141, 131 s |",
        ("faults.md", "sbatch --requeue"): "| the second node, with a spare |"
        " 23.7 (23.6 to 24.8) | 2.4 (2.1 to 2.8) |",
    }
    found = [one for one in MEASURED if f"results/{name}" in one.source]
    assert found
    assert all(numbers[name, one.way] in text for one in found)
    if name == "faults.md":
        assert "| the second node | 23.7 (23.6 to 24.8) | 29.0 (28.4 to 30.4) |" in text


def test_elsewhere_is_the_incident_and_the_measured_difference() -> None:
    (story,) = made(finished(), KILLED).stories
    ways = {one.way: estimated_s(story.cost, one) for one in elsewhere(story.incident)}
    assert ways["torchrun --max-restarts"] == pytest.approx(10.2 + 7.8 - 1.6)
    assert list(elsewhere(replace(story.incident, kind="hang"))) == []
    lost = replace(story.incident, culprit=replace(story.incident.culprit, rank=None))
    assert {one.scope for one in elsewhere(lost)} == {"host"}
    requeued = list(elsewhere(replace(lost, remedy="requeue")))
    assert [one.requeues for one in requeued] == [True]
    # Without a spare ndctl took longer there, and the report says so.
    assert estimated_s(story.cost, requeued[0]) < story.cost.seconds


class Checker(HTMLParser):
    """Elements are closed in order, and nothing outside is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not {"src", "href", "srcset", "onload", "onclick"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("events", [finished(), hung(), broken(), started()])
def test_the_page_is_one_whole_file(events: list[Event]) -> None:
    page = html_report(made(events, metrics(1, 24), price=Price(per_gpu_hour=2.0, origin="x")))
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "script" not in checker.tags
    assert "http" not in re.sub(r"http-equiv", "", page)
    for words in ("prefers-color-scheme: dark", "@media print", "default-src &#x27;none&#x27;"):
        assert words in page


def test_hostile_text_becomes_no_markup() -> None:
    report = made(finished(), KILLED, cause=EVIL)
    report = replace(report, view=replace(report.view, name=EVIL))
    page = html_report(report)
    checker = Checker()
    checker.feed(page)
    assert "script" not in checker.tags
    assert "img" not in checker.tags
    text = markdown_report(report)
    for shown in (page, text):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "<script>" not in re.sub(r"\\.", "", outside)
    assert [line for line in outside.splitlines() if line.startswith("# ")] == [
        next(line for line in outside.splitlines() if line.startswith("# Report of "))
    ]


def test_one_incident_can_be_told_alone() -> None:
    assert made(finished(), KILLED, only=1).is_whole is False
    assert len(made(finished(), KILLED, only=1).stories) == 1
    assert made(finished(), KILLED, only=2).stories == []


def test_a_long_timeline_keeps_its_beginning_and_its_end() -> None:
    again = [event for number in range(60) for event in started()]
    report = made(again)
    assert len(report.timeline) <= MOST_FIRST + MOST_LAST + 1
    assert any("more lines: `ndctl events`" in line for line in report.timeline)


def test_a_hang_says_that_it_was_not_measured_elsewhere() -> None:
    (story,) = made(finished(), KILLED).stories
    hang = replace(story, incident=replace(story.incident, kind="hang"))
    report = replace(made(finished(), KILLED), stories=[hang])
    assert NOT_MEASURED in html_report(report)
    assert NOT_MEASURED in markdown_report(report)

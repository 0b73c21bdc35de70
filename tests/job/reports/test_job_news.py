"""Which events of a job become Kubernetes events: few, short, each once."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.observe.reports import from_data, to_data
from orchestrator.contract.messages.events import (
    CancelRequested,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    HostStopped,
    ProgramRuns,
)
from orchestrator.job.leave import Result
from orchestrator.job.reports.job_news import (
    BURST,
    MOST_TEXT,
    ONE_EVERY_S,
    SAME_S,
    Budget,
    News,
    Reason,
    admit,
    news_of,
)
from orchestrator.job.reports.job_report import is_news, report_of
from orchestrator.job.stage import Ended
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.simulation.run import simulate
from tests.dashboard.dashboard_story import (
    START,
    broken,
    finished,
    recovered,
    restarting,
    seen_of,
    silent_program,
    started,
)


def all_news(events: Sequence[Event]) -> list[News]:
    run, found = Run(), list[News]()
    for event in events:
        before, (run, _) = run, step(run, event)
        found += news_of(before, event, run)
    return found


def test_a_program_without_steps_has_recovered_when_its_ranks_run_again() -> None:
    news = all_news(silent_program(ProgramRuns(at=START + 60, attempt=2)))
    assert (news[-1].reason, news[-1].text) == (
        "Recovered",
        "attempt 2 runs again, 30 s after exception",
    )


def test_a_job_with_one_restart_gives_five_events_in_order() -> None:
    lines = [(one.reason, one.warning, one.text) for one in all_news(finished())]
    assert [(reason, warning) for reason, warning, _ in lines] == [
        ("Started", False),
        ("Incident", True),
        ("Recovering", False),
        ("Recovered", False),
        ("Ended", False),
    ]
    texts = [text for _, _, text in lines]
    assert texts[0] == "attempt 1 trains from the beginning: 4 ranks on host-0, host-1"
    assert "culprit rank 1 on host-0" in texts[1]
    assert texts[2] == "attempt 2 starts from step 20"
    assert texts[3] == "attempt 2 trains again, 7 s after rank-killed"
    assert texts[4].startswith("SUCCEEDED at step 60 of 60, checkpoint step-60")


def test_an_incident_has_the_time_at_which_it_happened() -> None:
    """So it is listed before the recovery, although both are known at the same moment."""
    incident, recovering = all_news(restarting())[1:]
    assert (incident.reason, recovering.reason) == ("Incident", "Recovering")
    assert incident.at < recovering.at


def test_a_failed_checkpoint_is_reported_for_the_present_attempt_only() -> None:
    failed = CheckpointFailed(at=START + 40, attempt=2, step=30, why="No space left on device")
    (*_, last) = all_news([*recovered(), failed])
    assert (last.reason, last.warning) == ("CheckpointFailed", True)
    assert last.text == "checkpoint of step 30 failed: No space left on device"
    assert all_news([*recovered(), replace(failed, attempt=1)]) == all_news(recovered())


def test_texts_are_one_line_and_short() -> None:
    why = "first line\nsecond " * 100
    failed = CheckpointFailed(at=START + 40, attempt=1, step=30, why=why)
    (*_, last) = all_news([*started(), failed])
    assert "\n" not in last.text
    assert len(last.text) == MOST_TEXT


def test_the_event_of_the_end_names_the_checkpoint_to_resume_from() -> None:
    saved = CheckpointSaved(at=START + 30, attempt=1, step=20)
    cancelling = [*started(), saved, CancelRequested(at=START + 31, by="ann")]
    assert [one.reason for one in all_news(cancelling)] == ["Started"], "ranks have not stopped yet"
    stopped = [
        HostStopped(at=START + 33, attempt=1, host=host, finished=False)
        for host in ("host-0", "host-1")
    ]
    ended = all_news([*cancelling, *stopped])[-1]
    assert (ended.reason, ended.warning) == ("Ended", False)
    assert ended.text.startswith("CANCELLED at step 20 of 60, checkpoint step-20: cancelled by ann")


def news(text: str, at: float, reason: str = "Incident") -> News:
    return News(reason=reason, text=text, warning=True, at=at)  # type: ignore[arg-type]


def test_an_equal_event_is_repeated_only_after_a_while() -> None:
    budget, first = admit(Budget(), news("rank 3 was killed", 100.0))
    assert first is not None
    budget, again = admit(budget, news("rank 3 was killed", 200.0))
    assert again is None
    budget, later = admit(budget, news("rank 3 was killed", 101.0 + SAME_S))
    assert later is not None
    assert later.text == first.text, "an equal event is not counted as dropped"


def test_a_job_that_fails_again_and_again_sends_few_events() -> None:
    budget, told_texts = Budget(), list[str]()
    for number in range(1000):
        budget, one = admit(budget, news(f"incident {number}", 100.0 + number))
        told_texts += [one.text] if one else []
    assert BURST <= len(told_texts) <= BURST + 1000 / ONE_EVERY_S + 1
    assert any("events before it were dropped" in text for text in told_texts)
    budget, last = admit(budget, news("FAILED at step 7", 1100.0, "Ended"))
    assert last is not None, "the end is always reported"


def test_a_clock_that_goes_back_adds_no_budget() -> None:
    budget = Budget()
    for number in range(50):
        budget, _ = admit(budget, news(f"incident {number}", 1000.0 - number))
    assert budget.tokens < 1.0


def test_a_report_has_state_attempt_checkpoint_and_culprit() -> None:
    report = report_of(seen_of(broken()).run, START + 50)
    assert (report.state, report.attempt, report.steps) == ("RECOVERING", 1, 60)
    assert (report.checkpoint, report.culprit) == (20, "")
    recovered_report = report_of(seen_of(recovered()).run, START + 50)
    assert (recovered_report.state, recovered_report.culprit) == ("RUNNING", "rank 1 on host-0")
    assert report_of(seen_of(finished()).run, START + 90).step == 60


@pytest.mark.parametrize(("launch", "known_at", "expected"), [(1, 49.0, True), (1, 51.0, False)])
def test_a_report_is_news_only_if_it_is_newer_than_the_last_one(
    launch: int, known_at: float, expected: bool
) -> None:
    run = seen_of(recovered()).run
    report = replace(report_of(run, START + 50), launch=launch)
    assert is_news(report, run, START + known_at) == expected
    assert not is_news(replace(report, launch=launch + 1), run, START + known_at)


def test_simulated_jobs_report_each_end_once_in_short_texts() -> None:
    """With the random faults of the simulation."""

    def decide(run: Run, event: Event) -> Result:
        after, actions = step(run, event)
        found = list(news_of(run, event, after))
        counts.update(one.reason for one in found)
        assert all(one.text == " ".join(one.text.split()) for one in found)
        assert all(len(one.text) <= MOST_TEXT for one in found)
        ended = isinstance(after.stage, Ended) and not isinstance(run.stage, Ended)
        assert [one.reason for one in found].count("Ended") == int(ended)
        if after.job is not None:
            report = report_of(after, event.at)
            assert from_data(to_data(report)) == replace(report, updated=float(int(report.updated)))
        return after, actions

    counts: Counter[str] = Counter()
    for seed in range(4):
        assert simulate(seed, decide=decide).broken == ""
    assert {"Started", "Incident", "Recovering", "Recovered", "Ended"} <= set(counts)
    assert set(counts) <= {*get_args(Reason)}

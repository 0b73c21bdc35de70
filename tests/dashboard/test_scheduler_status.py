"""The state of jobs that have no leader because they wait in the queue of a scheduler."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import Event, JobSubmitted
from orchestrator.dashboard.follow.follow_loop import EndDetector, follow_job
from orchestrator.dashboard.job_view.replayed_job import ReplayedJob
from orchestrator.dashboard.job_view.standing import effective_state
from orchestrator.dashboard.job_view.view import view
from orchestrator.dashboard.metrics import NO_PROGRESS, fold_metrics
from orchestrator.dashboard.scheduler_status import POLL_INTERVAL_S, QUIET_S, SchedulerPoll
from orchestrator.job.reports.job_report import report_of
from orchestrator.job.stage import Ended, Submitted
from orchestrator.job.state import Run
from orchestrator.journal.journal import Journal
from orchestrator.seams import LaunchStatus
from tests.agent.world import TurnedClock
from tests.dashboard.dashboard_story import START, journal, metric, recovered, seen_of

WAITS = LaunchStatus("Slurm job 12 is PENDING (Resources)", held=True)


def on_slurm() -> Run:
    run = seen_of(recovered()).run
    assert run.job is not None
    return replace(run, job=replace(run.job, backend="slurm"))


def test_the_scheduler_is_asked_at_intervals_without_a_leader() -> None:
    asked: list[Run] = []

    def ask(run: Run) -> LaunchStatus | None:
        asked.append(run)
        return WAITS if len(asked) < 2 else None

    clock, run = TurnedClock(), on_slurm()
    holding = SchedulerPoll(ask, clock)
    assert holding(run, True) is None
    assert holding(replace(run, stage=Ended(since=0.0, reason="", ending="FAILED")), False) is None
    alone = seen_of(recovered()).run
    assert holding(alone, True) is None, "there is no scheduler"
    assert holding(replace(alone, stage=Submitted()), False) is None, "its leader may still start"
    assert asked == []
    assert [holding(run, False), holding(run, False)] == [WAITS, WAITS]
    assert len(asked) == 1
    clock.sleep(POLL_INTERVAL_S)
    assert holding(run, False) is None
    assert holding(run, True) is None
    assert holding(run, False) is None
    assert len(asked) == 3, "asked again when a leader has gone"


def test_a_local_job_without_a_leader_may_have_agents_that_take_over() -> None:
    alone, takes_over = seen_of(recovered()).run, LaunchStatus("taken over", held=True)
    assert SchedulerPoll(lambda run: takes_over, TurnedClock())(alone, False) == takes_over


STOPPED = LaunchStatus("Slurm job 12 is SUSPENDED", held=True, resume="scontrol resume 12")


def test_for_a_silent_job_with_a_leader_only_a_suspension_is_reported() -> None:
    asked: list[Run] = []

    def ask(run: Run) -> LaunchStatus | None:
        asked.append(run)
        return STOPPED if len(asked) == 1 else WAITS

    clock, run = TurnedClock(), on_slurm()
    holding = SchedulerPoll(ask, clock)
    assert holding(run, True, clock.now()) is None
    assert asked == []
    heard = clock.now() - QUIET_S - 1
    assert holding(run, True, heard) == replace(STOPPED, at=heard)
    clock.sleep(POLL_INTERVAL_S)
    assert holding(run, True, heard) is None
    assert len(asked) == 2


def test_a_suspended_job_shows_since_when_and_the_command_that_resumes_it() -> None:
    run = on_slurm()
    for led in (True, False):
        found = effective_state(
            ReplayedJob(run=run), led, START + 9999, launch_status=replace(STOPPED, at=START + 5000)
        )
        assert (found.state, found.since) == ("SUSPENDED", START + 5000)
        assert (found.reason, found.fix) == (STOPPED.words, "scontrol resume 12")
    over = replace(run, stage=Ended(since=0.0, reason="", ending="SUCCEEDED"))
    assert (
        effective_state(ReplayedJob(run=over), False, START + 9999, launch_status=STOPPED).state
        == "SUCCEEDED"
    )


def test_a_held_job_has_not_failed() -> None:
    run = on_slurm()
    assert effective_state(ReplayedJob(run=run), False, START + 9999).state == "FAILED"
    found = effective_state(ReplayedJob(run=run), False, START + 9999, launch_status=WAITS)
    assert (found.state, found.reason) == ("PENDING", WAITS.words)
    assert (
        effective_state(ReplayedJob(run=run), True, START + 9999, launch_status=WAITS).state
        == "RUNNING"
    )
    seen = replace(seen_of(recovered()), run=run)
    assert view(seen, leader_alive=False, now=START + 9999, launch_status=WAITS).state == "PENDING"


UNREACHABLE = LaunchStatus("PyTorchJob a/b", held=True, unknown="the API server cannot be reached")


def test_if_the_scheduler_fails_the_last_known_state_is_shown_with_its_age() -> None:
    run = on_slurm()
    found = effective_state(ReplayedJob(run=run), False, START + 9999, launch_status=UNREACHABLE)
    assert (found.state, found.reason) == ("RUNNING", "the API server cannot be reached")
    assert (found.since, found.as_of) == (run.stage.since, run.last_at)
    heard = replace(UNREACHABLE, at=START + 5000)
    assert (
        effective_state(ReplayedJob(run=run), False, START + 9999, launch_status=heard).as_of
        == START + 5000
    )
    assert (
        effective_state(ReplayedJob(run=run), True, START + 9999, launch_status=UNREACHABLE).as_of
        is None
    )


def test_the_last_step_is_a_sign_of_life_also_if_the_journal_is_older() -> None:
    run = on_slurm()
    progress = fold_metrics(NO_PROGRESS, [metric(900, 2, at=START + 6000)])
    taken_over = LaunchStatus("host-1 takes over", held=True, running=True)
    for status, state in ((taken_over, "RECOVERING"), (UNREACHABLE, "RUNNING")):
        found = effective_state(
            ReplayedJob(run=run), False, START + 9999, launch_status=status, progress=progress
        )
        since = START + 6000 if state == "RECOVERING" else run.stage.since
        assert (found.state, found.since) == (state, since)
        assert found.as_of == (None if state == "RECOVERING" else START + 6000)


def test_a_newer_report_of_the_leader_has_priority() -> None:
    run = on_slurm()
    told = replace(report_of(run, START + 6000), state="RECOVERING", message="rank 3 was killed")
    found = effective_state(
        ReplayedJob(run=run, report=told), False, START + 9999, launch_status=UNREACHABLE
    )
    assert (found.state, found.as_of) == ("RECOVERING", START + 6000)
    waits = effective_state(
        ReplayedJob(run=run, report=told), False, START + 9999, launch_status=WAITS
    )
    assert waits.state == "PENDING", "the scheduler knows better that no leader lives"
    over = replace(told, state="SUCCEEDED", message="all steps are done")
    found = effective_state(
        ReplayedJob(run=run, report=over), False, START + 9999, launch_status=UNREACHABLE
    )
    assert (found.state, found.reason, found.as_of) == ("SUCCEEDED", "all steps are done", None)


def test_a_deleted_job_is_cancelled_at_once() -> None:
    gone = LaunchStatus("it was deleted", held=False, over="CANCELLED", at=START + 7000)
    found = effective_state(ReplayedJob(run=on_slurm()), False, START + 9999, launch_status=gone)
    assert (found.state, found.reason, found.since) == ("CANCELLED", "it was deleted", START + 7000)
    failed = effective_state(
        ReplayedJob(run=on_slurm()), False, START + 9999, "ndctl submit", FAILED
    )
    assert (failed.state, failed.fix) == ("FAILED", "ndctl submit")


FAILED = LaunchStatus("it has Failed", held=False, over="FAILED")


def test_following_continues_while_hosts_of_the_job_may_still_write(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with Journal(run_dir.journal, TurnedClock()) as written:
        for entry in journal(on_kubernetes()):
            written.append(entry.event, entry.actions)
    said = [LaunchStatus("it was deleted", held=False, over="CANCELLED", leaving=True)]
    clock = TurnedClock()
    ended = EndDetector(run_dir, clock, lambda run: said[-1])
    assert not ended()
    said.append(replace(said[0], leaving=False))
    clock.sleep(POLL_INTERVAL_S)
    assert ended()


def on_kubernetes() -> list[Event]:
    first, *rest = recovered()
    assert isinstance(first, JobSubmitted)
    return [replace(first, backend="kubernetes"), *rest]


def test_following_reports_an_outage_once_and_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path)
    with Journal(run_dir.journal, TurnedClock()) as written:
        for entry in journal(on_kubernetes()):
            written.append(entry.event, entry.actions)
    gone = LaunchStatus("it was deleted", held=False, over="CANCELLED")
    told = iter([UNREACHABLE, UNREACHABLE, WAITS, gone])
    code = follow_job(run_dir, 0, TurnedClock(), lambda run: next(told))
    out = capsys.readouterr().out
    assert code == exit_codes.CANCELLED
    assert out.count("the API server cannot be reached; the job may still be training") == 1
    assert out.count("the state of the job is known again") == 1
    assert "CANCELLED, it was deleted" in out

"""The last step of an attempt, also of one that failed before its first."""

from orchestrator.dashboard.job_view.view import last_step
from orchestrator.dashboard.metrics import NO_PROGRESS, Metric, fold_metrics
from tests.job.job_driver import Job


def shown(job: Job, *lines: tuple[int, int]) -> int:
    found = [Metric(attempt=attempt, step=step) for attempt, step in lines]
    return last_step(job.run, fold_metrics(NO_PROGRESS, found))


def failed_before_its_first_step() -> Job:
    """Attempt 1 did 20 steps, and attempt 2 none."""
    job = Job().running()
    job.saves(10)
    job.exits(1, step=20)
    job.stops()
    job.exits(2)
    job.stops()
    return job


def test_an_attempt_that_failed_before_its_first_step_has_none_and_loses_none() -> None:
    job = failed_before_its_first_step()
    found = [(one.attempt, one.step, one.lost_steps) for one in job.run.history.incidents]
    assert found == [(1, 20, 10), (2, 0, 0)]


def test_the_job_is_as_far_as_before_an_attempt_without_a_step() -> None:
    job = failed_before_its_first_step()
    assert (job.run.attempt.step, job.run.attempt.own_step) == (20, 0)
    assert shown(job, (1, 18)) == 20


def test_steps_that_a_killed_rank_did_not_write_are_shown() -> None:
    job = Job().running()
    job.exits(0, step=9)
    assert shown(job, (1, 2)) == 2
    job.stops()
    assert shown(job, (1, 2)) == 9


def test_metrics_of_this_attempt_count_more_than_steps_of_an_earlier_one() -> None:
    job = Job().running()
    job.saves(10)
    job.exits(1, step=20)
    job.stops()
    assert shown(job, (1, 20), (2, 11)) == 11
    job.steps(12)
    assert shown(job, (1, 20)) == 12
    assert shown(job, (1, 20), (2, 13)) == 13

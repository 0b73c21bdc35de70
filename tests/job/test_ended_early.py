"""Ranks that exit with code 0 before the last step have failed."""

from typing import Any

from orchestrator.contract.messages.actions import EndJob, StopAttempt
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit
from orchestrator.diagnosis.logs.readings import End, read_exit
from tests.job.job_driver import GLOO_CLOSED, Job


def exits_with_0(job: Job, rank: int, step: int, **more: Any) -> Any:
    reading = read_exit(End(exit_code=0, signal=None))
    values = {"exit_code": 0, "signal": None, "step": step, "reading": reading}
    return job.exits(rank, **values | more)


def test_a_rank_that_exits_early_with_0_is_the_cause_and_ends_the_job() -> None:
    job = Job().running()
    (stop,) = exits_with_0(job, 2, step=3)
    assert isinstance(stop, StopAttempt)
    job.raises(0, GLOO_CLOSED)
    (end,) = job.stops()
    (incident,) = job.run.history.incidents
    steps = job.run.job.steps if job.run.job else 0
    cause = f"rank 2 ended with exit code 0 after step 3 of {steps}"
    assert (incident.failure, incident.cause) == ("ended-early", cause)
    assert (incident.culprit, incident.rule) == (Culprit(host="host-1", rank=2), "class-stop")
    reason = f"ended-early: {cause} (rule class-stop)"
    assert end == EndJob(state="FAILED", reason=reason)
    assert "exit code 0 before the last step, of 1 ranks: rank 2 after step 3" in (
        incident.evidence.notes
    )


def test_if_all_ranks_exit_early_with_0_there_is_no_culprit() -> None:
    job = Job().running()
    for rank in range(4):
        exits_with_0(job, rank, step=5)
    (end,) = job.stops()
    (incident,) = job.run.history.incidents
    assert (incident.culprit, incident.failure) == (NOBODY, "ended-early")
    assert isinstance(end, EndJob)
    assert end.state == "FAILED"
    assert "of 4 ranks: rank 0 after step 5, rank 1 after step 5" in incident.evidence.notes[0]


def test_the_rank_that_failed_first_is_the_culprit() -> None:
    job = Job().running()
    job.exits(1)
    exits_with_0(job, 2, step=3, stopped=True)
    job.stops()
    assert job.run.history.incidents[0].culprit.rank == 1

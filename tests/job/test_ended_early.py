"""Ranks that exit with code 0 before the last step have failed. In a program of the user, whose
number of steps is unknown, they have if others went on."""

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


def returns_first(job: Job, rank: int, step: int) -> Any:
    reading = read_exit(End(exit_code=0, signal=None, ended_first=True))
    return job.exits(rank, exit_code=0, signal=None, step=step, reading=reading, ended_first=True)


def test_a_rank_that_returned_before_its_peers_explains_their_lost_connections() -> None:
    job = Job(steps=0).running()
    job.raises(0, GLOO_CLOSED)
    returns_first(job, 1, step=20)
    job.raises(2, GLOO_CLOSED)
    job.stops()
    (incident,) = job.run.history.incidents
    cause = "rank 1 ended with exit code 0 after step 20, before the others"
    assert (incident.kind, incident.failure, incident.cause) == ("ended-first",) * 2 + (cause,)
    assert (incident.culprit, incident.scope) == (Culprit(host="host-0", rank=1), "user")
    assert incident.remedy == "restart"
    assert not job.run.hosts.exclude


def test_a_program_whose_rank_returns_twice_at_the_same_step_has_a_bug() -> None:
    job = Job(steps=0).running()
    for attempt in (1, 2):
        job.raises(0, GLOO_CLOSED)
        returns_first(job, 1, step=20)
        ended = job.stops()
        if attempt == 1:
            job.starts()
            job.trains()
    assert isinstance(ended[-1], EndJob)
    assert "the same error twice" in ended[-1].reason


def test_a_rank_that_returned_does_not_explain_an_error_of_a_peers_own() -> None:
    job = Job(steps=0).running()
    job.raises(2, "CUDA error: an illegal memory access was encountered")
    returns_first(job, 1, step=20)
    job.stops()
    assert job.run.history.incidents[0].culprit.rank == 2


def test_several_ranks_that_returned_first_have_no_culprit_among_them() -> None:
    job = Job(steps=0).running()
    job.raises(2, GLOO_CLOSED)
    for rank in (0, 1):
        returns_first(job, rank, step=20)
    job.stops()
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit) == ("ended-first", NOBODY)
    notes = "exit code 0 before the others, of 2 ranks: rank 0 after step 20, rank 1 after step 20"
    assert notes in incident.evidence.notes
    assert (incident.evidence.rank, incident.evidence.ended) == (0, Culprit(host="host-0", rank=0))


def test_a_host_whose_ranks_all_returned_explains_lost_connections_elsewhere() -> None:
    job = Job(steps=0).running()
    job.stops("host-0", finished=True)
    job.raises(2, GLOO_CLOSED)
    job.stops("host-1")
    (incident,) = job.run.history.incidents
    cause = "all ranks of host-0 ended with exit code 0 before the others"
    assert (incident.kind, incident.cause, incident.culprit) == ("ended-first", cause, NOBODY)
    assert (incident.failure, incident.remedy) == ("ended-first", "restart")
    # The exit that is known is of a peer, and the log to read is of a rank that ended.
    assert (incident.evidence.rank, incident.evidence.exit_code) == (2, 1)
    assert incident.evidence.ended == Culprit(host="host-0", rank=0)


def test_a_program_whose_host_returns_twice_at_the_same_step_has_a_bug() -> None:
    for steps, ends in (((20, 20), True), ((20, 25), False)):
        job = Job(steps=0).running()
        for step in steps:
            job.stops("host-1", finished=True)
            job.raises(0, GLOO_CLOSED, step=step)
            ended = job.stops("host-0")
            job.trains()
        assert isinstance(ended[-1], EndJob) is ends
        if ends:
            cause = "all ranks of host-1 ended with exit code 0 before the others"
            assert f"{cause}: the same error twice" in ended[-1].reason


def test_the_rank_that_failed_first_is_the_culprit() -> None:
    job = Job().running()
    job.exits(1)
    exits_with_0(job, 2, step=3, stopped=True)
    job.stops()
    assert job.run.history.incidents[0].culprit.rank == 1

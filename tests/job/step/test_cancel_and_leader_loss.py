"""A person cancels the job, or its leader dies, in every stage."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.messages.actions import (
    Action,
    EndJob,
    JudgeHang,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import CancelRequested, LeaderStarted, LeaveAsked
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.failures.policy import strike_weight
from orchestrator.job.stage import Starting, Waiting
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from tests.job.job_driver import GLOO_CLOSED, Job, drills, error, found, submitted

# Cancelling

MakeJob = Callable[[], Job]


def _hanging_job() -> Job:
    job = Job().running()
    job.hangs()
    return job


def _stopping_job() -> Job:
    job = Job().running()
    job.exits(1)
    return job


def _led_job() -> Job:
    job = Job()
    job.leads()
    return job


@pytest.mark.parametrize("make_job", [Job, _led_job], ids=["submitted", "waiting"])
def test_cancelling_before_the_start_ends_the_job_at_once(make_job: MakeJob) -> None:
    job = make_job()
    (end,) = job.cancelled()
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")
    assert job.run.state == "CANCELLED"


KILLED = "did not end within 30 s of SIGTERM (resilience.stop_grace) and had to be killed"


def test_ranks_that_did_not_heed_a_cancellation_are_named() -> None:
    job = Job().running()
    job.cancelled()
    job.stops("host-1", killed=(3,))
    (end,) = job.stops("host-0", killed=(0, 1))
    reason = f"cancelled by ann; ranks 0-1, 3 {KILLED}"
    assert end == EndJob(state="CANCELLED", reason=reason)


def test_ranks_that_did_not_heed_a_preemption_are_named_while_the_job_waits() -> None:
    job = Job().granted().running()
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    job.stops("host-1", killed=(2,))
    job.stops("host-1", killed=(2,))  # an agent repeats its reports
    job.stops("host-0")
    assert f"rank 2 {KILLED}" in job.run.stage.reason
    job.granted(restarts=1).running()
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    job.stops()
    assert "killed" not in job.run.stage.reason, "those of an earlier attempt do not count"


def test_ranks_killed_after_a_failure_are_no_news() -> None:
    """Their peer is gone, so they wait in a collective and cannot handle SIGTERM."""
    job = Job().running()
    job.exits(1)
    job.stops(killed=(0, 2, 3))
    assert "killed" not in job.run.stage.reason


@pytest.mark.parametrize(
    "make_job",
    [lambda: Job().starts(), lambda: Job().running()],
    ids=["starting", "running"],
)
def test_cancelling_a_live_attempt_gives_its_ranks_time_to_save(make_job: MakeJob) -> None:
    job = make_job()
    assert job.cancelled() == (StopAttempt(attempt=1, grace_s=30.0, reason="cancelled by ann"),)
    assert job.cancelled("bob") == (), "the second request changes nothing"
    job.exits(0, exit_code=exit_codes.CHECKPOINTED, stopped=True)
    (end,) = job.stops()
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")
    assert job.run.history.incidents == ()


def test_cancelling_while_ranks_stop_prevents_the_next_attempt() -> None:
    job = _stopping_job()
    assert job.cancelled() == ()
    (end,) = job.stops()
    assert isinstance(end, EndJob)
    assert end.state == "CANCELLED"


@pytest.mark.parametrize("by", ["ann", "the scheduler", "ann, and another leader ends it"])
def test_a_failure_before_the_cancellation_is_an_incident_with_a_strike(by: str) -> None:
    job = Job().running()
    job.raises(2, "CUDA error: uncorrectable ECC error encountered")
    words = "cancelled by ann"
    if by == "the scheduler":
        words = "cancelled by somebody, in the scheduler (SIGTERM)"
        job.tell(LeaveAsked(at=job.now(), cause="cancelled", words="SIGTERM"))
    else:
        job.cancelled()
    (end,) = job.leads() if "leader" in by else job.stops()
    assert end == EndJob(state="CANCELLED", reason=words)
    (incident,) = job.run.history.incidents
    assert (incident.failure, str(incident.culprit)) == ("uncorrectable-ecc", "rank 2 on host-1")
    assert (incident.action, incident.remedy, incident.rule) == (words, None, "")
    assert (incident.attempt, job.run.history.restarts, job.run.interruption.findings) == (
        1,
        0,
        None,
    )
    assert strike_weight(incident) == 1.0


def test_cancelling_a_hanging_job_still_names_the_rank_that_hangs() -> None:
    job = _hanging_job()
    stop, judge = job.cancelled()
    assert (type(stop), type(judge)) == (StopAttempt, JudgeHang)
    job.judged(2)
    (end,) = job.stops()
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("hang", "rank 2 on host-1")


def test_a_cancelled_job_does_not_wait_for_the_hang_analysis() -> None:
    job = _hanging_job()
    job.cancelled()
    (end,) = job.stops()
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit) == ("hang", NOBODY)


def test_ranks_that_save_after_a_suspected_hang_are_no_incident() -> None:
    job = _hanging_job()
    job.cancelled()
    job.exits(0, exit_code=exit_codes.CHECKPOINTED, stopped=True)
    (end,) = job.stops()
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")
    assert job.run.history.incidents == ()


@pytest.mark.parametrize("before", [False, True])
def test_failures_after_the_cancellation_are_no_incident(before: bool) -> None:
    """Exception: ranks had lost a peer before, so a later exit may explain that."""
    job = Job().running()
    if before:
        job.raises(0, GLOO_CLOSED)
    job.cancelled()
    job.exits(1, exit_code=exit_codes.CHECKPOINTED)
    job.raises(2, "shapes differ")
    job.loses("host-1", silent_s=0.0)
    job.stops("host-0")
    assert job.run.ending == "CANCELLED"
    incidents = [(one.kind, one.culprit.rank) for one in job.run.history.incidents]
    assert incidents == ([("exception", 2)] if before else [])


def test_a_host_preempted_before_the_cancellation_is_no_incident() -> None:
    job = Job().granted().starts()
    job.trains()
    job.loses("host-1", taken="Evicted: the node was low on memory")
    job.cancelled()
    job.stops("host-0")
    assert (job.run.ending, job.run.history.incidents) == ("CANCELLED", ())


def test_a_cancelled_job_whose_ranks_finish_succeeded() -> None:
    job = Job().running()
    job.cancelled()
    (end,) = job.stops(finished=True)
    assert isinstance(end, EndJob)
    assert end.state == "SUCCEEDED"


@pytest.mark.parametrize("how", ["lost", "stuck"])
def test_a_cancelled_job_ends_even_if_a_host_is_lost_or_stuck(how: str) -> None:
    job = Job().running()
    job.cancelled()
    job.stops("host-0")
    actions = job.loses("host-1") if how == "lost" else job.waits(46)
    (end,) = actions
    assert isinstance(end, EndJob)
    assert end.state == "CANCELLED"


def test_no_event_causes_an_action_after_the_end() -> None:
    job = Job().running()
    job.stops(finished=True)
    events: list[Callable[[], object]] = [
        job.cancelled,
        job.hangs,
        job.stops,
        lambda: job.exits(0),
        lambda: job.loses("host-0"),
        lambda: job.shows("host-0", found(0)),
        lambda: job.registers("host-0", pid=9),
        lambda: job.waits(1e6),
        lambda: job.saves(60),
    ]
    for send in events:
        assert send() == ()
        assert job.run.state == "SUCCEEDED"
    (end,) = job.leads()
    assert end == EndJob(
        state="SUCCEEDED", reason="the job has ended: all ranks finished in attempt 1"
    )


# A leader dies, or a person resumes the job


def resumed(job: Job, **more: Any) -> Job:
    job.tell(submitted(at=job.now(), resume=True, **more))
    return job


def test_resuming_by_a_person_restores_the_budget() -> None:
    job = Job(max_restarts=1).running()
    job.fails_once()
    job.fails_once()
    assert (job.run.ending, job.run.history.fruitless) == ("FAILED", 1)
    resumed(job, max_restarts=1).starts()
    assert job.run.history.fruitless == 0
    (start,) = job.fails_once()
    assert isinstance(start, StartAttempt)
    assert start.attempt == 4
    (end,) = job.fails_once()
    assert isinstance(end, EndJob)


@pytest.mark.parametrize("by_a_person", [True, False], ids=["resumed", "requeued"])
def test_a_dead_leader_is_an_incident_and_a_restart(by_a_person: bool) -> None:
    job = Job().running()
    job.saves(20)
    last = job.at
    job.at += 100
    if by_a_person:
        resumed(job)
        assert job.run.state == "SUBMITTED"
    assert job.leads() == ()
    assert (type(job.run.stage), job.run.state) == (Waiting, "RECOVERING")
    job.registers("host-0")
    (start,) = job.registers("host-1")
    assert isinstance(start, StartAttempt)
    assert start.attempt == 2
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.at) == ("leader-lost", last)
    assert incident.detected_after_s >= 100
    assert incident.culprit.host is None
    assert (job.run.history.restarts, job.run.history.fruitless) == (1, 0 if by_a_person else 1)
    job.trains(first=20)
    assert job.run.history.incidents[0].recovered_after_s is not None


def test_a_leader_that_dies_under_every_attempt_spends_the_budget() -> None:
    job = Job(max_restarts=1).running()
    assert job.starts().run.attempt.number == 2
    (end,) = job.leads()
    assert isinstance(end, EndJob)
    assert end.state == "FAILED"


def test_a_person_may_resume_a_job_whose_budget_is_zero() -> None:
    job = resumed(Job(max_restarts=0).running(), max_restarts=0)
    assert isinstance(job.starts().run.stage, Starting)


def test_a_leader_that_dies_while_waiting_is_no_incident() -> None:
    job = _led_job()
    job.registers("host-0")
    job.leads()
    assert (type(job.run.stage), job.run.hosts.by_name, job.run.history.incidents) == (
        Waiting,
        {},
        (),
    )


def test_a_leader_that_cannot_lead_ends_the_job_with_its_reason() -> None:
    job = Job(hosts=2)
    unable = LeaderStarted(at=job.now(), host="host-0", pid=9, unable="no scontrol in the image")
    assert job.tell(unable) == (EndJob(state="FAILED", reason="no scontrol in the image"),)
    assert job.run.history.incidents == ()


def without_leader(job: Job, reached: Reached | None = None) -> Sequence[Action]:
    return job.tell(CancelRequested(at=job.now(), by="ann", led=False, reached=reached))


def test_a_cancel_that_no_leader_took_tells_of_the_lost_leader_and_restarts_nothing() -> None:
    job = Job().running()
    job.saves(5)
    at = job.at + 40
    job.at += 60
    (end,) = without_leader(job, Reached(attempt=1, step=9, at=at))
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.at, incident.step) == ("leader-lost", at, 9)
    assert (incident.action, incident.remedy, incident.rule) == ("cancelled by ann", None, "")
    assert (job.run.attempt.number, job.run.history.restarts, job.run.history.fruitless) == (
        1,
        0,
        0,
    )
    assert without_leader(job) == (), "a second cancel changes nothing"


def test_a_leader_that_the_cancellation_ended_is_no_lost_leader() -> None:
    """Slurm had suspended the job, so the leader lived and could not answer."""
    job = Job().granted().running()
    asked_at = job.at + 10
    job.at += 20
    unanswered = CancelRequested(at=job.now(), by="ann", led=False, asked_at=asked_at)
    assert job.tell(unanswered) == (EndJob(state="CANCELLED", reason="cancelled by ann"),)
    assert job.run.history.incidents == ()


@pytest.mark.parametrize(("later_s", "kinds"), [(5.0, ["exception"]), (-5.0, [])])
def test_only_what_failed_before_the_leader_was_asked_is_an_incident(
    later_s: float, kinds: list[str]
) -> None:
    job = Job().granted().running()
    job.raises(2, "shapes differ")
    asked_at = job.at + later_s
    job.at += 20
    job.tell(CancelRequested(at=job.now(), by="ann", led=False, asked_at=asked_at))
    assert [one.kind for one in job.run.history.incidents] == kinds


def test_a_failure_before_the_leader_died_stays_the_cause_of_a_cancelled_job() -> None:
    job = Job().running()
    job.raises(2, "shapes differ")
    without_leader(job)
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit.rank) == ("exception", 2)
    assert (incident.action, job.run.history.restarts) == ("cancelled by ann", 0)


def test_a_second_cancel_ends_a_job_whose_leader_died_with_the_first() -> None:
    job = Job().running()
    job.cancelled("bob")
    (end,) = without_leader(job)
    assert end == EndJob(state="CANCELLED", reason="cancelled by bob")
    assert job.run.history.incidents == ()


def _queued_job() -> Job:
    job = Job().granted().running()
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    job.stops()
    return job


@pytest.mark.parametrize(
    "make_job", [Job, _led_job, _queued_job], ids=["submitted", "waiting", "queued"]
)
def test_a_cancel_without_a_leader_is_no_incident_if_no_rank_ran(make_job: MakeJob) -> None:
    job = make_job()
    (end,) = without_leader(job)
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")
    assert job.run.history.incidents == ()
    assert job.run.history.ignored == {}


def test_a_requeue_does_not_restart_a_cancelled_job() -> None:
    job = Job().running()
    job.cancelled()
    (end,) = job.leads()
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")


def test_a_person_may_resume_a_cancelled_job() -> None:
    job = Job().running()
    job.cancelled()
    assert isinstance(resumed(job).starts().run.stage, Starting)


def test_a_failure_before_the_leader_died_stays_the_cause() -> None:
    job = Job().running()
    job.raises(2, "shapes differ")
    job.starts()
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit.rank) == ("exception", 2)
    job.raises(2, "shapes differ")
    (end,) = job.stops()
    assert isinstance(end, EndJob), "the same error twice"


def test_lost_steps_are_counted_from_the_metrics_if_a_person_resumes_the_job() -> None:
    """The journal has only the first step of the attempt."""
    job = Job().running()
    job.saves(5)
    at = job.at + 40
    job.at += 60
    resumed(job, reached=Reached(attempt=1, step=9, at=at))
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.step, incident.lost_steps) == ("leader-lost", 9, 4)
    assert incident.at == at


def test_errors_before_a_submission_by_a_person_do_not_count_as_repeated() -> None:
    job = Job().running()
    job.raises(2, "shapes differ")
    job.exits(0, exit_code=exit_codes.REFUSED, error=error("no", "TrainingError"))
    resumed(job).starts().trains()
    assert job.run.history.incidents[0].action == "the job was submitted again"
    job.raises(2, "shapes differ")
    assert isinstance(job.stops()[-1], StartAttempt)
    job.raises(2, "shapes differ")
    assert isinstance(job.stops()[-1], EndJob)


def test_a_resumed_job_counts_its_drills_from_one_again() -> None:
    first, second = drills("kill:rank=1@step=5"), drills("stop:rank=2@step=9")
    job = Job(drills=first).running()
    job.drill(1)
    resumed(job, drills=second)
    assert job.run.history.incidents[0].drill == "kill:rank=1@step=5"
    job.starts()
    (start,) = job.all[-1][1]
    assert isinstance(start, StartAttempt)
    assert start.drills == second


def test_a_resumed_job_keeps_its_attempt_number_and_incidents() -> None:
    job = Job(max_restarts=0).running()
    job.saves(20)
    job.fails_once()
    assert job.run.state == "FAILED"
    resumed(job).starts().trains(first=20)
    assert (job.run.attempt.number, job.run.progress.saved, job.run.history.restarts) == (2, 20, 0)
    (incident,) = job.run.history.incidents
    assert incident.recovered_after_s is not None


def test_a_job_submitted_without_resume_has_no_history() -> None:
    job = Job().running()
    fresh, actions = step(job.run, submitted())
    assert actions == ()
    assert fresh == step(Run(), submitted())[0]


def test_exit_code_0_of_a_cancelled_script_is_no_success() -> None:
    """A program may have a handler of SIGTERM that ends it with 0, as Lightning has."""
    job = Job(run=RunSpec(script="train.py")).running()
    job.cancelled()
    job.stops("host-1", finished=True)
    (end,) = job.stops("host-0", finished=True)
    assert end == EndJob(state="CANCELLED", reason="cancelled by ann")


def test_a_cancelled_job_of_the_trainer_may_have_finished() -> None:
    """Ranks of the bundled trainer that stop early have another exit code."""
    job = Job().running()
    job.cancelled()
    job.stops("host-1", finished=True)
    (end,) = job.stops("host-0", finished=True)
    assert isinstance(end, EndJob)
    assert end.state == "SUCCEEDED"

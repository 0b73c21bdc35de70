"""Ranks called collectives that do not match: the culprit is a rank, never a host."""

import signal
from typing import Any

import pytest

from orchestrator.contract.messages.actions import (
    Action,
    EndJob,
    GatherEvidence,
    JudgeHang,
    StartAttempt,
)
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit
from orchestrator.job.attempt_end import ASK_S, JUDGE_S
from orchestrator.job.stage import Stopping
from tests.diagnosis.cause.test_diagnose import MISMATCH
from tests.job.job_driver import GLOO_CLOSED, Job

ABORTED: dict[str, Any] = {"signal": signal.SIGABRT, "log_tail": MISMATCH}


def mismatched_job(symptom_first: bool = False, **more: Any) -> tuple[Job, tuple[Action, ...]]:
    """A job in which gloo aborted rank 1, and the actions after all ranks ended."""
    job = Job(**more).running()
    return job, rank_1_aborts(job, symptom_first)


def rank_1_aborts(job: Job, symptom_first: bool = False) -> tuple[Action, ...]:
    if symptom_first:
        job.raises(3, GLOO_CLOSED)
    job.exits(1, **ABORTED)
    if not symptom_first:
        job.raises(3, GLOO_CLOSED)
    return job.stops()


def analysis_names(job: Job, rank: int = 2, confidence: float = 0.95) -> tuple[Action, ...]:
    return job.judged(
        rank,
        verdict="mismatch",
        scope="user",
        hosts=(),
        confidence=confidence,
        cause=f"rank {rank} called another operation",
    )


@pytest.mark.parametrize("symptom_first", [False, True])
def test_the_recorded_collectives_are_gathered_and_the_rank_that_differs_is_named(
    symptom_first: bool,
) -> None:
    job, actions = mismatched_job(symptom_first)
    (ask,) = actions
    assert isinstance(ask, GatherEvidence)
    assert ask.ended
    assert isinstance(job.run.stage, Stopping)
    assert job.shows("host-0") == ()
    (judge,) = job.shows("host-1")
    assert isinstance(judge, JudgeHang)
    assert job.shows("host-1") == (judge,), "the same evidence again orders the same analysis"
    (start,) = analysis_names(job)
    assert isinstance(start, StartAttempt)
    (incident,) = job.run.history.incidents
    assert (incident.failure, incident.scope) == ("collective-mismatch", "user")
    assert incident.culprit == Culprit(rank=2), "rank 1 aborted because of what rank 2 sent"
    assert "rank 2 called another operation" in incident.cause
    assert incident.confidence == 0.95


@pytest.mark.parametrize("answered", [(), ("host-0",), ("host-0", "host-1")])
def test_without_answers_the_job_restarts_and_there_is_no_culprit(
    answered: tuple[str, ...],
) -> None:
    job, _ = mismatched_job()
    for name in answered:
        job.shows(name)
    assert job.waits(ASK_S - 6) == ()
    actions = job.waits(JUDGE_S)
    assert [type(action) for action in actions] == [StartAttempt]
    (incident,) = job.run.history.incidents
    assert (incident.failure, incident.culprit) == ("collective-mismatch", NOBODY)
    assert "is not known" in incident.cause


def test_an_analysis_with_low_confidence_names_no_culprit() -> None:
    job, _ = mismatched_job()
    for name in ("host-0", "host-1"):
        job.shows(name)
    analysis_names(job, confidence=0.5)
    assert job.run.history.incidents[0].culprit == NOBODY


def test_the_same_rank_at_the_same_step_twice_is_a_repeated_error() -> None:
    job = Job().running()
    actions: tuple[Action, ...] = ()
    for _ in range(2):
        rank_1_aborts(job)
        job.shows("host-0")
        job.shows("host-1")
        actions = analysis_names(job)
    (end,) = actions
    assert isinstance(end, EndJob)
    assert "the same error twice" in end.reason
    assert job.run.history.incidents[-1].signature == "mismatch of rank 2 at step 0"


def test_a_failure_class_of_the_user_needs_no_analysis() -> None:
    own = FailureRule(name="sizes", scope="user", action="restart", patterns=("preamble",))
    job, actions = mismatched_job(failure_classes=(own,))
    assert [type(action) for action in actions] == [StartAttempt]
    assert job.run.history.incidents[0].failure == "sizes"


def test_a_job_that_is_cancelled_during_the_analysis_ends() -> None:
    job, _ = mismatched_job()
    (end,) = job.cancelled()
    assert isinstance(end, EndJob)
    assert end.state == "CANCELLED"

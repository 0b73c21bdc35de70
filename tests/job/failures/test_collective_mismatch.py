"""Ranks that end because what they called did not fit: who is named, and that no host is."""

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
from tests.job.supervise_stage import GLOO_CLOSED, Job

ABORTED: dict[str, Any] = {"signal": signal.SIGABRT, "log_tail": MISMATCH}


def ended(symptom_first: bool = False, **more: Any) -> tuple[Job, tuple[Action, ...]]:
    """A job of which gloo ended rank 1, and what was ordered when no rank was left."""
    job = Job(**more).running()
    return job, ends(job, symptom_first)


def ends(job: Job, symptom_first: bool = False) -> tuple[Action, ...]:
    if symptom_first:
        job.raises(3, GLOO_CLOSED)
    job.exits(1, **ABORTED)
    if not symptom_first:
        job.raises(3, GLOO_CLOSED)
    return job.stops()


def judged(job: Job, rank: int = 2, confidence: float = 0.95) -> tuple[Action, ...]:
    return job.judged(
        rank,
        verdict="mismatch",
        scope="user",
        hosts=(),
        confidence=confidence,
        cause=f"rank {rank} called another operation",
    )


@pytest.mark.parametrize("symptom_first", [False, True])
def test_what_ranks_had_called_is_asked_for_and_who_differed_is_named(symptom_first: bool) -> None:
    job, actions = ended(symptom_first)
    (ask,) = actions
    assert isinstance(ask, GatherEvidence)
    assert ask.ended
    assert isinstance(job.run.stage, Stopping)
    assert job.shows("host-0") == ()
    (judge,) = job.shows("host-1")
    assert isinstance(judge, JudgeHang)
    assert job.shows("host-1") == (judge,), "said again: the same verdict comes of it"
    (start,) = judged(job)
    assert isinstance(start, StartAttempt)
    (incident,) = job.run.history.incidents
    assert (incident.failure, incident.scope) == ("collective-mismatch", "user")
    assert incident.culprit == Culprit(rank=2), "rank 1 was ended by what rank 2 sent"
    assert "rank 2 called another operation" in incident.cause
    assert incident.confidence == 0.95


@pytest.mark.parametrize("came", [(), ("host-0",), ("host-0", "host-1")])
def test_what_does_not_come_is_not_waited_for_and_nobody_is_blamed(came: tuple[str, ...]) -> None:
    job, _ = ended()
    for name in came:
        job.shows(name)
    assert job.waits(ASK_S - 6) == ()
    actions = job.waits(JUDGE_S)
    assert [type(action) for action in actions] == [StartAttempt]
    (incident,) = job.run.history.incidents
    assert (incident.failure, incident.culprit) == ("collective-mismatch", NOBODY)
    assert "is not known" in incident.cause


def test_a_verdict_that_is_not_sure_names_nobody() -> None:
    job, _ = ended()
    for name in ("host-0", "host-1"):
        job.shows(name)
    judged(job, confidence=0.5)
    assert job.run.history.incidents[0].culprit == NOBODY


def test_the_same_rank_at_the_same_step_twice_is_the_programs_own() -> None:
    job = Job().running()
    actions: tuple[Action, ...] = ()
    for _ in range(2):
        ends(job)
        job.shows("host-0")
        job.shows("host-1")
        actions = judged(job)
    (end,) = actions
    assert isinstance(end, EndJob)
    assert "the same error twice" in end.reason
    assert job.run.history.incidents[-1].signature == "mismatch of rank 2 at step 0"


def test_a_class_of_the_users_own_is_not_asked_about() -> None:
    own = FailureRule(name="sizes", scope="user", action="restart", patterns=("preamble",))
    job, actions = ended(failure_classes=(own,))
    assert [type(action) for action in actions] == [StartAttempt]
    assert job.run.history.incidents[0].failure == "sizes"


def test_a_job_that_is_cancelled_meanwhile_ends() -> None:
    job, _ = ended()
    (end,) = job.cancelled()
    assert isinstance(end, EndJob)
    assert end.state == "CANCELLED"

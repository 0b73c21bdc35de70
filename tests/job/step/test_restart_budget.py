"""When a failed job restarts, and when its restart budget is spent."""

import pytest

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.actions import EndJob, StartAttempt
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.failures import policy
from orchestrator.job.incident import Incident
from orchestrator.job.state import Run
from tests.job.job_driver import Job, error


def test_restarts_without_a_checkpoint_spend_the_budget() -> None:
    job = Job(max_restarts=2).running()
    for attempt in (2, 3):
        (start,) = job.fails_once()
        assert isinstance(start, StartAttempt)
        assert start.attempt == attempt
    (end,) = job.fails_once()
    assert end == EndJob(
        state="FAILED",
        reason="2 restarts without a new checkpoint, the most that max_restarts allows; last cause:"
        " rank 1 was killed by SIGKILL (rule max-restarts)",
    )
    assert (job.run.history.restarts, len(job.run.history.incidents)) == (2, 3)
    assert job.run.history.incidents[-1].decided == (
        "stopped the job: 2 restarts without a new checkpoint, the most that max_restarts allows;"
        " last cause: rank 1 was killed by SIGKILL"
    )


def test_without_a_budget_the_first_failure_ends_the_job() -> None:
    (end,) = Job(max_restarts=0).running().fails_once()
    assert end == EndJob(
        state="FAILED",
        reason="max_restarts is 0; last cause: rank 1 was killed by SIGKILL (rule max-restarts)",
    )


def test_a_new_checkpoint_restores_the_budget() -> None:
    job = Job(max_restarts=1).running()
    for number in range(1, 6):
        job.saves(10 * number)
        (start,) = job.fails_once()
        assert isinstance(start, StartAttempt)
    job.saves(50)  # this checkpoint is known already, so it is no progress
    assert isinstance(job.fails_once()[0], EndJob)


def test_a_resume_beyond_the_known_checkpoint_counts_as_progress() -> None:
    """Ranks that lost their leader saved a checkpoint that no leader could journal."""
    job = Job(max_restarts=2).running()
    job.saves(10)
    job.fails_once()
    job.fails_once()
    job.trains(first=47)
    assert (job.run.progress.saved, job.run.history.fruitless) == (47, 1)
    job.fails_once()
    job.trains(first=40)
    assert (job.run.progress.saved, job.run.history.fruitless) == (47, 2)


def test_the_same_error_at_the_same_step_twice_ends_the_job_with_its_traceback() -> None:
    job = Job(max_restarts=9).running()
    job.raises(2, "shapes differ")
    job.stops()
    job.trains()
    job.raises(3, "shapes differ")
    (end,) = job.stops()
    assert end == EndJob(
        state="FAILED",
        reason="rank 3 raised RuntimeError: shapes differ at step 10: the same error twice, so the"
        " program has a bug (rule repeated-error)",
    )
    assert "RuntimeError: shapes differ" in job.run.history.incidents[-1].evidence.traceback


@pytest.mark.parametrize(
    "second",
    [{"at_step": 11}, {"message": "shapes differ again"}, {"kind": "ValueError"}],
    ids=["another step", "another message", "another class"],
)
def test_a_different_error_restarts_the_job(second: dict[str, object]) -> None:
    job = Job().running()
    job.raises(2, "shapes differ")
    job.stops()
    message = str(second.pop("message", "shapes differ"))
    job.raises(2, message, **second)
    assert isinstance(job.stops()[-1], StartAttempt)


def test_a_connection_lost_twice_is_not_a_repeated_error() -> None:
    job = Job().running()
    for _ in range(2):
        job.raises(2, "Connection closed by peer [::1]:1")
        assert isinstance(job.stops()[-1], StartAttempt)
        job.trains()


def test_a_configuration_that_the_trainer_refuses_ends_the_job_at_once() -> None:
    job = Job().starts()
    message = "tp=3 does not divide\n  fix: set tp to 2"
    job.exits(0, exit_code=exit_codes.REFUSED, error=error(message, "TrainingError"))
    (end,) = job.stops()
    assert isinstance(end, EndJob)
    cause = "the trainer refused its configuration: tp=3 does not divide"
    assert end.reason == f"{cause} (rule invalid-configuration); fix: set tp to 2"
    incident = job.run.history.incidents[-1]
    assert (incident.cause, incident.action, incident.advice) == (cause, cause, "set tp to 2")
    assert incident.culprit == NOBODY, "every rank would refuse it"
    evidence = incident.evidence
    assert (evidence.traceback, evidence.log_tail, evidence.notes) == ("", (), ())


def test_a_decision_looks_no_further_back_than_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of months has thousands of incidents, and each replay decides all of them again."""
    looks: list[str] = []

    is_over = policy._is_over

    def counted(rule: PolicyRule, run: Run, incident: Incident, at: float) -> bool:
        looks.append(rule.name)
        return is_over(rule, run, incident, at)

    monkeypatch.setattr(policy, "_is_over", counted)
    job = Job(max_restarts=1).running()
    costs = []
    for number in range(1, 30):
        job.trains(first=10 * (number - 1))
        job.saves(10 * number)
        looks.clear()
        (start,) = job.fails_once()
        assert isinstance(start, StartAttempt)
        job.at += 10_000.0
        costs.append(len(looks))
    # Two rules count the kills of a day, which are nine here.
    assert max(costs) == costs[12] == costs[-1]

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.backends.slurm.pending_hints import advice, needed, standing_words
from orchestrator.contract.times import date_time


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("JobHeldUser", "held"),
        ("launch_failed_requeued_held", "held"),
        ("launch failed requeued held", "held"),
        ("Resources", "queued"),
    ],
)
def test_a_held_job_is_one_that_a_person_must_let_go(reason: str, meaning: str) -> None:
    job = SlurmJob(id="7", state="PENDING", reason=reason)
    assert job.meaning == meaning
    assert ("scontrol release 7" in advice(job)) == (meaning == "held")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("ReqNodeNotAvail, UnavailableNodes:node[3-4]", "sinfo -R"),
        ("ReqNodeNotAvail,_May_be_reserved_for_other_job", "sinfo -R"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_"
         "partitions", "sinfo -R"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
         "partitions", "sinfo -R"),
        ("InvalidAccount", "cluster.slurm.account"),
        ("InvalidQOS", "cluster.slurm.qos"),
        ("PartitionTimeLimit", "cluster.slurm.time"),
        ("BadConstraints", "ndctl cancel"),
        ("BadConstraints", "too few nodes match the request, and Slurm does not retry; cancel"),
        ("Dependency", "another job"),
        ("DependencyNeverSatisfied", "never be satisfied"),
    ],
)  # fmt: skip
def test_a_pending_reason_has_advice(reason: str, said: str) -> None:
    assert said in advice(SlurmJob(id="7", state="PENDING", reason=reason))


def test_a_job_with_a_begin_time_is_shown_with_it() -> None:
    at = datetime(2026, 11, 30, 15, 49, 11, tzinfo=UTC).timestamp()
    job = SlurmJob(id="7", state="PENDING", reason="BeginTime", starts_at=at)
    # In the zone of the reader's machine, as the other times of `ndctl status`.
    assert advice(job) == f"the job starts not before {date_time(at, None)}"
    assert "Slurm does not say" in advice(replace(job, starts_at=None))


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("JobHeldUser", "to release it: scontrol release 7"),
        ("launch_failed_requeued_held", "to release it: scontrol release 7"),
        ("JobHeldAdmin", "ask an administrator to run `scontrol release 7`"),
        ("PartitionNodeLimit", "waiting does not help, so do what the first line says"),
        ("Resources", ""),
        ("BeginTime", ""),
    ],
)
def test_a_job_that_does_not_start_by_itself_needs_a_person(reason: str, said: str) -> None:
    assert needed(SlurmJob(id="7", state="PENDING", reason=reason)) == said
    assert needed(SlurmJob(id="7", state="RUNNING", reason=reason)) == ""


def test_an_unknown_pending_reason_has_no_advice() -> None:
    assert advice(SlurmJob(id="7", state="PENDING", reason="SomethingElse")) == ""


def test_a_pending_job_is_shown_with_advice() -> None:
    waits = SlurmJob(id="7", state="PENDING", reason="JobHeldUser")
    hint = "the job is held; release it with `scontrol release 7`"
    assert standing_words(waits) == f"Slurm job 7 is PENDING (JobHeldUser): {hint}"
    assert standing_words(SlurmJob(id="7", state="RUNNING")) == "Slurm job 7 is RUNNING"

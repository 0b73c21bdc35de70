from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.backends.slurm import observe
from orchestrator.backends.slurm.observe import SlurmJob

CAPTURED = Path(__file__).parent / "captured"


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def captured_jobs() -> tuple[SlurmJob, ...]:
    return observe.parse_jobs((CAPTURED / "job-22.05.txt").read_text(), UTC)


def test_a_job_is_parsed_with_any_comment() -> None:
    running = captured_jobs()[0]
    assert running == SlurmJob(
        id="1",
        state="RUNNING",
        nodes=("node1", "node2"),
        starts_at=at("2026-11-22T02:04:01"),
        since=at("2026-11-22T02:04:00"),
        ends_at=at("2027-11-22T02:04:01"),
        limit_at=at("2027-11-22T02:04:01"),
        exit_code="0:0",
        comment="ndctl launch 1 of /tmp/x y;",
        command="/tmp/tb/j.sh",
    )


def test_restarts_tell_a_requeued_completing_job_from_a_cancelled_one() -> None:
    _, requeued, cancelled = captured_jobs()
    assert observe.cause(requeued, 0, at("2026-11-22T02:09:12"), 90) == "requeued"
    assert observe.cause(cancelled, 0, at("2026-11-22T02:09:21"), 90) == "cancelled"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"state": "RUNNING"}, "unknown"),
        ({"state": "RUNNING", "ends_at": 1080.0}, "time-limit"),
        ({"state": "RUNNING", "ends_at": 1100.0}, "unknown"),
        ({"state": "RUNNING", "preempted": True}, "preempted"),
        ({"state": "PREEMPTED"}, "preempted"),
        ({"state": "TIMEOUT"}, "time-limit"),
        ({"state": "COMPLETING", "ends_at": 1000.0, "limit_at": 1000.0}, "time-limit"),
        ({"state": "COMPLETING", "ends_at": 900.0, "limit_at": 1000.0}, "cancelled"),
        ({"state": "CANCELLED"}, "cancelled"),
        ({"state": "PENDING"}, "requeued"),
        ({"state": "REQUEUE_HOLD"}, "requeued"),
        ({"state": "COMPLETING", "reason": "TimeLimit"}, "time-limit"),
        ({"state": "COMPLETING", "reason": "JobLaunchFailure"}, "failed"),
        ({"state": "COMPLETING", "reason": "RaisedSignal:9(Killed)"}, "failed"),
        ({"state": "COMPLETING", "reason": "NonZeroExitCode"}, "failed"),
        ({"state": "COMPLETING", "reason": "SomethingNew"}, "unknown"),
        ({"state": "FAILED"}, "failed"),
        ({"state": "NODE_FAIL"}, "failed"),
        ({"state": "COMPLETED"}, "unknown"),
    ],
)
def test_the_reason_why_a_run_ends_is_known(change: dict[str, object], cause: str) -> None:
    job = replace(SlurmJob(id="1", state="?", restarts=2), **change)
    assert observe.cause(job, 2, 1000.0, 90.0) == cause


def test_the_failure_of_a_run_is_described() -> None:
    killed = SlurmJob(id="1", state="COMPLETING", reason="JobLaunchFailure", exit_code="0:9")
    said = "JobLaunchFailure, the batch script was ended by signal 9 (SIGKILL)"
    assert observe.ending_words(killed) == said
    failed = SlurmJob(id="1", state="FAILED", exit_code="3:0")
    assert observe.ending_words(failed) == "FAILED, the batch script ended with code 3"
    assert observe.ending_words(SlurmJob(id="1", state="NODE_FAIL")) == "NODE_FAIL"


def test_an_unknown_state_is_not_the_end() -> None:
    assert SlurmJob(id="1", state="SOMETHING_NEW").meaning == "running"
    assert not SlurmJob(id="1", state="SOMETHING_NEW").is_over


def test_the_queue_is_read_with_bars_in_the_comment() -> None:
    text = (
        "1|RUNNING|None|(null)|2026-11-30T15:49:11|2026-11-30T15:49:10|/tmp/j.sh|"
        "ndctl launch 1 of /x; a|b\n"
        "2|PENDING|Resources|node[1,3-4]|N/A|2026-11-30T15:49:10|/t|(null)\n\n"
    )
    first, second = observe.parse_queue(text, UTC)
    assert (first.starts_at, second.starts_at) == (1796053751.0, None)
    assert second.since == 1796053750.0
    assert (first.excluded, second.excluded) == ((), ("node1", "node3", "node4"))
    assert (first.id, first.reason, first.comment) == ("1", "", "ndctl launch 1 of /x; a|b")
    assert (second.state, second.reason, second.comment) == ("PENDING", "Resources", "")

"""Faults in real processes: the losses equal those of an uninterrupted run bit by bit."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.job import (
    TP,
    WAIT_S,
    Ndctl,
    assert_nothing_left,
    kill,
    losses_without_ndctl,
    submit_args,
    wait_for,
)
from tests.nfs_locks import byte_ranges

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(1200)]

SLOW_DOWN = ("--drill", "slow:rank=1@step=2")
"""Each step takes twice as long as the first, so that the job does not end before the fault."""
SMALL = {"cluster__gpus_per_host": "1"}
"""2 hosts x 1 rank, for tests that do not need four ranks: starting ranks takes most time."""
ONE_HOST = {
    "cluster__hosts": "1",
    "cluster__gpus_per_host": "4",
    "train__steps": "12",
    **TP,
}
"""1 host x 4 ranks: dp_shard=2, tp=2."""


# In every run kills/test_memory_checkpoints.py has these faults.
@pytest.mark.slow
def test_a_job_resumes_after_two_ranks_and_then_a_host_are_lost(
    ndctl: Ndctl, reference: Ndctl
) -> None:
    faults = ("exit:rank=3@step=5", "kill:rank=1@step=14", "kill:host=1@step=22")
    drills = [word for fault in faults for word in ("--drill", fault)]
    # Otherwise a save may not be complete six steps later, on a busy machine.
    done = ndctl.submit("--follow", *drills, checkpoint__async="false")
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    left, first, second = ndctl.status()["incidents"]
    assert (left["kind"], left["culprit"]) == ("rank-exited", {"host": "host-1", "rank": 3})
    assert left["action"] == "restart as attempt 2 from the beginning: no checkpoint yet"
    assert left["evidence"]["exit_code"] == 1
    assert (first["kind"], first["culprit"]) == ("rank-killed", {"host": "host-0", "rank": 1})
    assert (second["kind"], second["culprit"]) == ("host-lost", {"host": "host-1", "rank": None})
    assert first["drill"] == "kill:rank=1@step=14"
    assert first["evidence"]["signal"] == "SIGKILL"
    assert first["action"] == "restart as attempt 3 from checkpoint step-8"
    assert second["action"] == "restart as attempt 4 from checkpoint step-16"
    for incident in (left, first, second):
        assert incident["detected_after_s"] >= 0
        assert incident["recovered_after_s"] > 0
    assert "kill:rank=1@step=14" in done.out
    assert "\nranks         one row per host" in done.out.split("starting attempt 1")[0]
    assert_nothing_left(ndctl.run_dir)


# tests/posix/test_locks.py tests the locks themselves, tests/agent/test_attempt.py an attempt.
@pytest.mark.slow
def test_a_job_recovers_and_ends_where_locks_are_those_of_nfs(
    ndctl: Ndctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = Path(byte_ranges.__file__).parent
    monkeypatch.setenv("PYTHONPATH", str(locks), prepend=os.pathsep)
    done = ndctl.submit("--follow", "--drill", "kill:host=1@step=10", **SMALL, train__steps="12")
    assert done.code == 0, done.out + done.err
    status = ndctl.status()
    assert (status["state"], status["attempt"]) == ("SUCCEEDED", 2)
    (lost,) = status["incidents"]
    assert (lost["kind"], lost["culprit"]["host"]) == ("host-lost", "host-1")
    assert_nothing_left(ndctl.run_dir)


# In every run a test on real Slurm covers this:
# tests/slurm/e2e/faults/test_recovery_in_allocation.py.
@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_host(ndctl: Ndctl, reference: Ndctl) -> None:
    spare = {"cluster__spare_hosts": "1"}
    done = ndctl.submit("--follow", "--drill", "kill:host=1@step=12", **spare)
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    assert ndctl.status()["hosts"] == ["host-0", "host-2"]
    assert_nothing_left(ndctl.run_dir)


# In every run tests/agent/test_injections.py has ranks that hang, and own_program/ a whole job.
@pytest.mark.slow
def test_a_stopped_rank_is_named_as_the_cause_of_a_hang(ndctl: Ndctl, reference: Ndctl) -> None:
    done = ndctl.submit("--follow", "--drill", "stop:rank=2@step=12")
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    (incident,) = ndctl.status()["incidents"]
    assert (incident["kind"], incident["culprit"]) == ("hang", {"host": "host-1", "rank": 2})
    assert incident["confidence"] >= 0.9
    assert "stopped by a signal" in " ".join([incident["cause"], *incident["evidence"]["notes"]])
    traces = ndctl.run_dir / "traces" / "attempt-1"
    kept = {path.name for path in traces.iterdir()}
    assert {f"flight-{rank}" for rank in (0, 1, 3)} | {"host-host-0.jsonl"} <= kept
    (host,) = (traces / "host-host-1.jsonl").read_text().splitlines()
    assert json.loads(host)["missing"]["dump of rank 2"] == "the process is stopped (state T)"
    assert set(incident["evidence"]["stacks"]) == {"0", "1", "2", "3"}
    assert any("trainer" in line for line in incident["evidence"]["stacks"]["0"])
    assert incident["evidence"]["stacks"]["2"] == []
    assert_nothing_left(ndctl.run_dir)


def test_an_agent_takes_over_from_a_killed_leader_and_without_any_agent_resume_works(
    ndctl: Ndctl, reference: Ndctl
) -> None:
    """Before the kill, the terminal that follows the job is closed, and the job continues."""
    following = ndctl.start(*submit_args("--follow", *SLOW_DOWN, checkpoint__every_steps="3"))
    wait_for(lambda: ndctl.num_steps() >= 2, "step 2")
    os.kill(following.pid, signal.SIGINT)
    _, output = following.communicate(timeout=WAIT_S)
    assert following.returncode == 130
    assert "ndctl dashboard e2e" in output
    wait_for(lambda: ndctl.events("CheckpointSaved"), "a checkpoint without a following terminal")
    (leader,) = ndctl.events("LeaderStarted")
    kill(leader["pid"])
    wait_for(lambda: len(ndctl.events("TrainingResumed")) == 2, "the attempt of the next leader")
    locks = sorted((ndctl.run_dir / "logs").glob("agent-*.lock"))
    assert [lock.stem for lock in locks] == ["agent-host-0", "agent-host-1"]
    for lock in locks:
        kill(int(lock.read_text()))
    assert_nothing_left(ndctl.run_dir)
    # The agents may be killed before attempt 2 has done a step.
    steps = [metric["step"] for metric in ndctl.metrics() if metric["attempt"] == 2]
    reached = max([ndctl.events("TrainingResumed")[1]["step"], *steps])

    lost = ndctl.status()["incidents"][0]
    assert (lost["kind"], lost["culprit"]["host"]) == ("leader-lost", None)
    assert "it takes over" in ndctl("events", "e2e").out
    status = ndctl.status()
    assert status["state"] == "FAILED"
    assert "--resume" in ndctl("status", "e2e").out
    assert ndctl.submit().code == 5

    done = ndctl.submit("--resume", "--follow")
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    resumed = ndctl.events("TrainingResumed")[2]["step"]
    assert resumed > 0
    incident = ndctl.status()["incidents"][-1]
    assert (incident["kind"], incident["lost_steps"]) == ("leader-lost", reached - resumed)
    assert_nothing_left(ndctl.run_dir)


@pytest.mark.slow
def test_the_same_exception_twice_is_the_programs_fault(ndctl: Ndctl) -> None:
    drill = ("--drill", "raise:rank=1@step=10")
    done = ndctl.submit("--follow", *drill, *drill, **SMALL)
    assert done.code == 1, done.out + done.err
    status = ndctl.status()
    assert (status["state"], status["attempt"]) == ("FAILED", 2)
    assert "same error twice" in status["reason"]
    for incident in status["incidents"]:
        assert incident["kind"] == "exception"
        assert incident["culprit"] == {"host": "host-1", "rank": 1}
    assert "Traceback (most recent call last)" in done.out
    assert "RuntimeError" in ndctl("describe", "e2e").out
    assert_nothing_left(ndctl.run_dir)


def test_a_checkpoint_that_was_being_written_is_never_used(ndctl: Ndctl) -> None:
    """Rank 0 has written its part, the write of rank 1 hangs, and rank 1 is killed."""
    shape = {"train__steps": "9", "checkpoint__every_steps": "3", **SMALL}
    # Slow steps: the storage hangs from step 6 on, and the files of step 3 must be whole by then.
    drills = (*SLOW_DOWN, "--drill", "write:rank=1@step=6")
    assert ndctl.submit(*drills, **shape).code == 0
    checkpoints = ndctl.run_dir / "checkpoints"
    partial = wait_for(
        lambda: _being_written(checkpoints, 6), "the second checkpoint to be started"
    )
    assert (checkpoints / "step-3").exists()
    assert not (checkpoints / "step-6").exists()
    kill(ndctl.rank_pid(1))

    wait_for(ndctl.has_ended, "the end")
    assert ndctl.status()["state"] == "SUCCEEDED"
    resumed = ndctl.events("TrainingResumed")[1]
    assert resumed["step"] == 3
    # If rank 0 lives a moment longer, it deletes the files of the failed save.
    assert {passed["name"] for passed in resumed["passed_over"]} <= {partial.name}
    ndctl.losses()
    assert_nothing_left(ndctl.run_dir)


def _being_written(checkpoints: Path, step: int) -> Path | None:
    """The folder of a checkpoint of which some data are written."""
    return next((file.parent for file in checkpoints.glob(f"step-{step}.partial-*/*.distcp")), None)


def test_cancel_writes_a_checkpoint_that_resume_uses(
    ndctl: Ndctl, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With tensor parallelism. tests/slurm/e2e/scheduling/test_cancellation.py has two hosts."""
    assert ndctl.submit(*SLOW_DOWN, **ONE_HOST).code == 0
    assert ndctl.submit(**ONE_HOST).code == 5, "a running job must not be started twice"
    wait_for(lambda: ndctl.num_steps() >= 2, "step 2")
    done = ndctl("cancel", "e2e")
    assert done.code == 0, done.err
    assert "CANCELLED" in done.out
    assert_nothing_left(ndctl.run_dir)
    stopped_at = ndctl.status()["checkpoint"]["step"]
    assert stopped_at >= 2

    assert ndctl.submit("--resume", "--follow", **ONE_HOST).code == 0
    assert ndctl.events("TrainingResumed")[1]["step"] == stopped_at
    assert ndctl.losses() == losses_without_ndctl(tmp_path_factory, **ONE_HOST)

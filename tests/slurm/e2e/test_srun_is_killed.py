"""srun alone is killed on a node that lives: the job queues again by itself, or goes on without."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.job import processes_of, wait_for
from tests.slurm.e2e.scheduler_job import Job, uninterrupted

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

SAVES = {"checkpoint.every_steps": "4"}


def sruns(job: Job) -> dict[int, int]:
    """The process of srun -> its parent. It starts a second one, which ends the step when the
    first is killed."""
    lines = processes_of(job.run_dir).items()
    return {pid: parent_of(pid) for pid, line in lines if line.startswith("srun ")}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])


def training(job: Job, step: int) -> dict[int, int]:
    job.submitted(**SAVES)
    job.until_step(step)
    found = sruns(job)
    assert len(found) == 2, found
    return found


def test_the_job_queues_again_by_itself_and_goes_on_from_its_checkpoint(job: Job) -> None:
    found = training(job, 6)
    (own,) = (pid for pid, parent in found.items() if parent not in found)
    os.kill(own, signal.SIGKILL)
    job.until("the next run", lambda: len(job.events("LeaderStarted")) == 2)
    job.until_ended()

    assert job.shown()["JobState"] == "COMPLETED"
    assert job.shown()["Restarts"] == "1"
    assert job.losses() == uninterrupted(**SAVES)
    status = job.status()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1)
    assert [incident["kind"] for incident in status["incidents"]] == ["leader-lost"]
    job.assert_resumed_where_it_left(attempt=2)
    assert "what started them ended with code 137" in agent_logs(job)
    assert agent_logs(job).count("the job is queued again") == 1


def test_given_up_by_scancel_at_that_moment_it_ends(job: Job) -> None:
    found = training(job, 3)
    (own,) = (pid for pid, parent in found.items() if parent not in found)
    os.kill(own, signal.SIGKILL)
    job.slurm.told("scancel", job.id)
    job.until_left()
    assert job.shown()["JobState"] == "CANCELLED"
    assert job.shown()["Restarts"] == "0"
    assert len(job.events("LeaderStarted")) == 1


def test_agents_that_live_on_train_to_the_end(job: Job) -> None:
    """Whatever kills both processes of srun has nobody end the step."""
    for pid in training(job, 3):
        os.kill(pid, signal.SIGSTOP)
    for pid in sruns(job):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "goes on without it" in agent_logs(job), "the script to see it")
    job.until_ended()

    assert (job.shown()["JobState"], job.shown()["Restarts"]) == ("COMPLETED", "0")
    assert job.losses() == uninterrupted(**SAVES)
    job.assert_blameless()
    assert len(job.events("LeaderStarted")) == 1


def agent_logs(job: Job) -> str:
    return "\n".join(path.read_text() for path in (job.run_dir / "logs").glob("agent-*.log"))

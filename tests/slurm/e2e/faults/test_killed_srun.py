"""srun or the batch script is killed on a healthy node: the job is requeued or continues.

No host becomes a culprit.
"""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import processes_of, wait_for
from tests.slurm.e2e.two_node_job import Job, uninterrupted

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

SAVES = {"checkpoint.every_steps": "4"}


def sruns(job: Job) -> dict[int, int]:
    """Pid of each srun process to that of its parent. srun starts a second process, which ends the
    step when the first one is killed."""
    lines = processes_of(job.run_dir).items()
    return {pid: parent_of(pid) for pid, line in lines if line.startswith("srun ")}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])


def training(job: Job, step: int) -> dict[int, int]:
    job.submit_successfully(**SAVES)
    job.wait_for_step(step)
    found = sruns(job)
    assert len(found) == 2, found
    return found


def test_after_srun_is_killed_the_job_is_requeued_and_resumes(job: Job) -> None:
    found = training(job, 6)
    (own,) = (pid for pid, parent in found.items() if parent not in found)
    os.kill(own, signal.SIGKILL)
    job.wait_until("the next run", lambda: len(job.events("LeaderStarted")) == 2)
    job.wait_for_end()

    assert job.slurm_job()["JobState"] == "COMPLETED"
    assert job.slurm_job()["Restarts"] == "1"
    assert job.losses() == uninterrupted(**SAVES)
    status = job.status()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1)
    (incident,) = status["incidents"]
    assert_allocation_broke(incident)
    assert incident["cause"].startswith("SIGKILL ended srun on node")
    job.assert_resumed_without_lost_step(attempt=2)
    assert "the command that started them ended with exit code 137" in agent_logs(job)
    assert agent_logs(job).count("the job is queued again") == 1


def assert_allocation_broke(incident: dict[str, Any]) -> None:
    assert (incident["kind"], incident["culprit"]) == (
        "allocation-broke",
        {"host": None, "rank": None},
    )
    assert incident["recovered_after_s"] is not None


def batch_shell(job: Job) -> int:
    lines = {pid: line for pid, line in all_processes().items() if "slurm_script" in line}
    mine = [pid for pid, line in lines.items() if f"job{int(job.id):05}/" in line]
    shells = [pid for pid in mine if parent_of(pid) not in mine]
    assert len(shells) == 1, lines
    return shells[0]


def all_processes() -> dict[int, str]:
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_batch_script_is_no_cancel_and_the_job_is_requeued(
    job: Job, number: signal.Signals
) -> None:
    """Slurm ends the run. If no agent requeues the job in time, Slurm ends it as FAILED."""
    training(job, 6)
    os.kill(batch_shell(job), number)
    job.wait_until("the next run", lambda: len(job.events("LeaderStarted")) == 2)
    job.wait_for_end()

    assert (job.slurm_job()["JobState"], job.slurm_job()["Restarts"]) == ("COMPLETED", "1")
    assert job.losses() == uninterrupted(**SAVES)
    status = job.status()
    assert (status["state"], status["restarts"]) == ("SUCCEEDED", 1)
    (incident,) = status["incidents"]
    assert_allocation_broke(incident)
    assert (
        f"the batch script was ended by signal {int(number)} ({number.name})" in incident["cause"]
    )
    job.assert_resumed_without_lost_step(attempt=2)


def test_a_job_cancelled_by_scancel_at_that_moment_ends(job: Job) -> None:
    found = training(job, 3)
    (own,) = (pid for pid, parent in found.items() if parent not in found)
    os.kill(own, signal.SIGKILL)
    job.slurm.output_of("scancel", job.id)
    job.wait_until_gone()
    assert job.slurm_job()["JobState"] == "CANCELLED"
    assert job.slurm_job()["Restarts"] == "0"
    assert len(job.events("LeaderStarted")) == 1


def test_agents_that_survive_srun_train_to_the_end(job: Job) -> None:
    """If both srun processes are killed, no process ends the step."""
    for pid in training(job, 3):
        os.kill(pid, signal.SIGSTOP)
    for pid in sruns(job):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "continues without it" in agent_logs(job), "the batch script to notice")
    job.wait_for_end()

    assert (job.slurm_job()["JobState"], job.slurm_job()["Restarts"]) == ("COMPLETED", "0")
    assert job.losses() == uninterrupted(**SAVES)
    job.assert_succeeded_without_incident()
    assert len(job.events("LeaderStarted")) == 1


def agent_logs(job: Job) -> str:
    return "\n".join(path.read_text() for path in (job.run_dir / "logs").glob("agent-*.log"))

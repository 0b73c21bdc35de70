"""`ndctl submit --here` in an existing allocation, on real Slurm daemons."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.job import SPEC, kill, processes_of, wait_for
from tests.slurm.e2e.submission.test_rendered_script import SAVES, job_fields
from tests.slurm.e2e.two_node_job import NAME, Job, uninterrupted
from tests.slurm.testbed import SlurmTestbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]
LONG = {**SAVES, "train.steps": "80"}
SETS = {**SAVES, "cluster.hosts": "2"}


@contextlib.contextmanager
def allocation(job: Job, nodes: int, *options: str) -> Iterator[Job]:
    """`ndctl` in the shell of an allocation, which is released afterwards."""
    argv = ["salloc", "--no-shell", f"--nodes={nodes}", "--exclusive", "--no-kill", *options]
    done = job.slurm(argv)
    granted = re.search(r"Granted job allocation (\d+)", done.err)
    assert granted, done.err
    try:
        yield job.with_environ(SLURM_JOB_ID=granted[1])
    finally:
        job.slurm(["scancel", granted[1]])


def allocated(job: Job) -> str:
    return job.environ["SLURM_JOB_ID"]


@pytest.fixture
def job(slurm: SlurmTestbed, tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path / "runs", slurm)
    yield found
    slurm.restore()
    wait_for(lambda: not processes_of(found.run_dir), "the end of every process", 60)


def submit_here(job: Job, *words: str, **options: str) -> "subprocess.Popen[str]":
    sets = [f"--set={key}={value}" for key, value in {**SETS, **options}.items()]
    return job.start("submit", str(SPEC), "--here", *sets, *words)


def wait_for_exit(process: "subprocess.Popen[str]") -> tuple[int, str]:
    out, err = process.communicate(timeout=400)
    return process.returncode, out + err


def steps(job: Job) -> list[str]:
    output = job.slurm.output_of("squeue", "-h", "-s", "-j", allocated(job), "-o", "%i %j")
    return [line.split()[0] for line in output.splitlines() if "ndctl" in line]


def assert_allocation_unchanged(job: Job) -> None:
    """The allocation still runs and has no step or process of ndctl."""
    state = job_fields(job.slurm, allocated(job))
    assert (state["JobState"], state["Restarts"], state["JobName"]) == ("RUNNING", "0", "no-shell")
    assert steps(job) == []
    assert not processes_of(job.run_dir)


def test_ranks_the_leader_and_a_node_are_lost_and_the_job_goes_on(job: Job) -> None:
    with allocation(job, 3) as job_here:
        process = submit_here(job_here)
        job_here.wait_for_step(2)
        assert (
            f"step {allocated(job_here)}.0 of" in job_here("list").out
            or "RUNNING" in job_here("list").out
        )
        kill(job_here.rank_pid(1))
        job_here.wait_for_step(6, attempt=2)
        leader = job_here.events("LeaderStarted")[-1]
        kill(leader["pid"])
        job_here.wait_until("another leader", lambda: len(job_here.events("LeaderStarted")) > 1)
        job_here.wait_for_step(10, attempt=3)
        lost = job_here.actions_of_kind("StartAttempt")[-1]["hosts"][-1]
        job_here.slurm.kill_node(lost)
        code, text = wait_for_exit(process)
        assert code == 0, text
        assert job_here.losses() == uninterrupted(**SAVES)
        assert job_fields(job_here.slurm, allocated(job_here))["JobState"] == "RUNNING"
        # Slurm keeps the step until it has given up the node that is dead.
        wait_for(lambda: steps(job_here) == [], "the end of the step", 120)


def test_an_interrupted_job_ends_with_a_checkpoint_and_resumes_in_place(job: Job) -> None:
    with allocation(job, 2) as job_here:
        process = submit_here(job_here)
        job_here.wait_for_step(5)
        # A job name can be used only once, also from another allocation.
        refused = job_here("submit", str(SPEC), "--here")
        assert f"job {NAME} already exists and has not ended: RUNNING" in refused.err
        process.send_signal(signal.SIGINT)
        code, text = wait_for_exit(process)
        assert code == 7, text
        assert f"cancelling {NAME}" in text
        assert "--here --resume" in text
        reached = max(job_here.losses())
        assert job_here.events("CheckpointSaved")[-1]["step"] == reached
        assert_allocation_unchanged(job_here)
        code, text = wait_for_exit(submit_here(job_here, "--resume"))
        assert code == 0, text
        assert job_here.losses() == uninterrupted(**SAVES)
        assert_allocation_unchanged(job_here)


def test_a_terminal_that_is_closed_ends_the_job(job: Job) -> None:
    with allocation(job, 2) as job_here:
        process = submit_here(job_here)
        job_here.wait_for_step(2)
        process.send_signal(signal.SIGHUP)
        assert wait_for_exit(process)[0] == 7
        assert job_here.actions_of_kind("EndJob")[-1]["state"] == "CANCELLED"
        assert_allocation_unchanged(job_here)


def test_scancel_of_the_step_cancels_the_job_and_not_the_allocation(job: Job) -> None:
    with allocation(job, 2) as job_here:
        process = submit_here(job_here)
        job_here.wait_for_step(5)
        (step,) = steps(job_here)
        job_here.slurm.output_of("scancel", step)
        code, text = wait_for_exit(process)
        assert code == 7, text
        assert_allocation_unchanged(job_here)


def test_cancel_from_another_terminal_ends_the_step_alone(job: Job) -> None:
    with allocation(job, 2) as job_here:
        process = submit_here(job_here)
        job_here.wait_for_step(2)
        done = replace(job_here, extra_environ={})("cancel", NAME)
        assert done.code == 0, done.err
        assert wait_for_exit(process)[0] == 7
        assert_allocation_unchanged(job_here)


def test_a_killed_starter_leaves_a_job_that_can_be_seen_and_cancelled(job: Job) -> None:
    with allocation(job, 2) as job_here:
        process = submit_here(job_here, **LONG)
        job_here.wait_for_step(2)
        process.kill()
        wait_for_exit(process)
        reached = job_here.last_step()
        job_here.wait_for_step(reached + 3)
        other_terminal = replace(job_here, extra_environ={})
        assert other_terminal.status()["scheduler"].startswith("`ndctl submit --here` in Slurm job")
        done = other_terminal("cancel", NAME)
        assert done.code == 0, done.err
        assert "CANCELLED" in done.out
        assert_allocation_unchanged(job_here)


def test_if_srun_is_killed_another_step_resumes(job: Job) -> None:
    with allocation(job, 2) as job_here:
        process = submit_here(job_here)
        job_here.wait_for_step(6)
        sruns = [
            pid for pid, line in processes_of(job_here.run_dir).items() if line.startswith("srun")
        ]
        for pid in sruns:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code, text = wait_for_exit(process)
        assert code == 0, text
        assert job_here.losses() == uninterrupted(**SAVES)
        assert_allocation_unchanged(job_here)


def test_ranks_save_before_the_allocation_ends_and_lose_no_step(job: Job) -> None:
    with allocation(job, 2, "--time=60") as job_here:
        process = submit_here(job_here, **LONG)
        job_here.wait_for_step(4)
        job_here.slurm.output_of(
            "scontrol", "update", f"JobId={allocated(job_here)}", "TimeLimit=2"
        )
        code, text = wait_for_exit(process)
        assert code == 1, text
        assert "the time limit of the allocation is near" in text
        assert f"its allocation, Slurm job {allocated(job_here)}, ends at " in text
        assert "--here --resume" in text
        reached = max(job_here.losses())
        assert job_here.events("CheckpointSaved")[-1]["step"] == reached < 80
        assert steps(job_here) == []
        refused = job_here("submit", str(SPEC), "--here", "--resume")
        assert refused.code == 5, refused.err
        assert "ends in " in refused.err
    with allocation(job, 2) as job_here:
        code, text = wait_for_exit(submit_here(job_here, "--resume", **LONG))
        assert code == 0, text
        assert job_here.losses() == uninterrupted(**LONG)


def test_too_few_nodes_end_the_job_and_not_the_allocation(job: Job) -> None:
    with allocation(job, 2) as job_here:
        process = submit_here(job_here)
        job_here.wait_for_step(6)
        lost = job_here.actions_of_kind("StartAttempt")[-1]["hosts"][-1]
        job_here.slurm.kill_node(lost)
        code, text = wait_for_exit(process)
        assert code == 1, text
        assert "has only 1 of 2 needed nodes left" in text
        assert "--here --resume" in text
        assert job_fields(job_here.slurm, allocated(job_here))["JobState"] == "RUNNING"
        assert steps(job_here) == []
        job_here.slurm.start_node(lost)
    job.slurm.restore()
    with allocation(job, 2) as job_here:
        code, text = wait_for_exit(submit_here(job_here, "--resume"))
        assert code == 0, text
        assert job_here.losses() == uninterrupted(**SAVES)

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
from tests.slurm.e2e.test_rendered_script import SAVES, job_fields
from tests.slurm.e2e.two_node_job import NAME, Job, uninterrupted
from tests.slurm.testbed import SlurmTestbed

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
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


def here(job: Job, *words: str, **options: str) -> "subprocess.Popen[str]":
    sets = [f"--set={key}={value}" for key, value in {**SETS, **options}.items()]
    return job.start("submit", str(SPEC), "--here", *sets, *words)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    out, err = process.communicate(timeout=400)
    return process.returncode, out + err


def steps(job: Job) -> list[str]:
    said = job.slurm.output_of("squeue", "-h", "-s", "-j", allocated(job), "-o", "%i %j")
    return [line.split()[0] for line in said.splitlines() if "ndctl" in line]


def assert_is_whole(job: Job) -> None:
    """The allocation still runs and has no step or process of ndctl."""
    state = job_fields(job.slurm, allocated(job))
    assert (state["JobState"], state["Restarts"], state["JobName"]) == ("RUNNING", "0", "no-shell")
    assert steps(job) == []
    assert not processes_of(job.run_dir)


def test_ranks_the_leader_and_a_node_are_lost_and_the_job_goes_on(job: Job) -> None:
    with allocation(job, 3) as mine:
        process = here(mine)
        mine.wait_for_step(2)
        assert f"step {allocated(mine)}.0 of" in mine("list").out or "RUNNING" in mine("list").out
        kill(mine.rank_pid(1))
        mine.wait_for_step(6, attempt=2)
        leader = mine.events("LeaderStarted")[-1]
        kill(leader["pid"])
        mine.wait_until("another leader", lambda: len(mine.events("LeaderStarted")) > 1)
        mine.wait_for_step(10, attempt=3)
        lost = mine.actions_of_kind("StartAttempt")[-1]["hosts"][-1]
        mine.slurm.kill_node(lost)
        code, told = ended(process)
        assert code == 0, told
        assert mine.losses() == uninterrupted(**SAVES)
        assert job_fields(mine.slurm, allocated(mine))["JobState"] == "RUNNING"
        assert steps(mine) == []


def test_an_interrupted_job_ends_with_a_checkpoint_and_resumes_in_place(job: Job) -> None:
    with allocation(job, 2) as mine:
        process = here(mine)
        mine.wait_for_step(5)
        # A job name can be used only once, also from another allocation.
        refused = mine("submit", str(SPEC), "--here")
        assert f"job {NAME} is running" in refused.err
        process.send_signal(signal.SIGINT)
        code, told = ended(process)
        assert code == 7, told
        assert f"cancelling {NAME}" in told
        assert "--here --resume" in told
        reached = max(mine.losses())
        assert mine.events("CheckpointSaved")[-1]["step"] == reached
        assert_is_whole(mine)
        code, told = ended(here(mine, "--resume"))
        assert code == 0, told
        assert mine.losses() == uninterrupted(**SAVES)
        assert_is_whole(mine)


def test_a_terminal_that_is_closed_ends_the_job(job: Job) -> None:
    with allocation(job, 2) as mine:
        process = here(mine)
        mine.wait_for_step(2)
        process.send_signal(signal.SIGHUP)
        assert ended(process)[0] == 7
        assert mine.actions_of_kind("EndJob")[-1]["state"] == "CANCELLED"
        assert_is_whole(mine)


def test_scancel_of_the_step_cancels_the_job_and_not_the_allocation(job: Job) -> None:
    with allocation(job, 2) as mine:
        process = here(mine)
        mine.wait_for_step(5)
        (step,) = steps(mine)
        mine.slurm.output_of("scancel", step)
        code, told = ended(process)
        assert code == 7, told
        assert_is_whole(mine)


def test_cancel_from_another_terminal_ends_the_step_alone(job: Job) -> None:
    with allocation(job, 2) as mine:
        process = here(mine)
        mine.wait_for_step(2)
        done = replace(mine, extra_environ={})("cancel", NAME)
        assert done.code == 0, done.err
        assert ended(process)[0] == 7
        assert_is_whole(mine)


def test_a_killed_starter_leaves_a_job_that_can_be_seen_and_cancelled(job: Job) -> None:
    with allocation(job, 2) as mine:
        process = here(mine, **LONG)
        mine.wait_for_step(2)
        process.kill()
        ended(process)
        reached = mine.last_step()
        mine.wait_for_step(reached + 3)
        elsewhere = replace(mine, extra_environ={})
        assert elsewhere.status()["scheduler"].startswith("`ndctl submit --here` in Slurm job")
        done = elsewhere("cancel", NAME)
        assert done.code == 0, done.err
        assert "CANCELLED" in done.out
        assert_is_whole(mine)


def test_if_srun_is_killed_another_step_resumes(job: Job) -> None:
    with allocation(job, 2) as mine:
        process = here(mine)
        mine.wait_for_step(6)
        sruns = [pid for pid, line in processes_of(mine.run_dir).items() if line.startswith("srun")]
        for pid in sruns:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code, told = ended(process)
        assert code == 0, told
        assert mine.losses() == uninterrupted(**SAVES)
        assert_is_whole(mine)


def test_ranks_save_before_the_allocation_ends_and_lose_no_step(job: Job) -> None:
    with allocation(job, 2, "--time=60") as mine:
        process = here(mine, **LONG)
        mine.wait_for_step(4)
        mine.slurm.output_of("scontrol", "update", f"JobId={allocated(mine)}", "TimeLimit=2")
        code, told = ended(process)
        assert code == 1, told
        assert "the time limit of the allocation is near" in told
        assert f"its allocation, Slurm job {allocated(mine)}, ends at " in told
        assert "--here --resume" in told
        reached = max(mine.losses())
        assert mine.events("CheckpointSaved")[-1]["step"] == reached < 80
        assert steps(mine) == []
        refused = mine("submit", str(SPEC), "--here", "--resume")
        assert refused.code == 5, refused.err
        assert "ends in " in refused.err
    with allocation(job, 2) as mine:
        code, told = ended(here(mine, "--resume", **LONG))
        assert code == 0, told
        assert mine.losses() == uninterrupted(**LONG)


def test_too_few_nodes_end_the_job_and_not_the_allocation(job: Job) -> None:
    with allocation(job, 2) as mine:
        process = here(mine)
        mine.wait_for_step(6)
        lost = mine.actions_of_kind("StartAttempt")[-1]["hosts"][-1]
        mine.slurm.kill_node(lost)
        code, told = ended(process)
        assert code == 1, told
        assert "has only 1 of 2 needed nodes left" in told
        assert "--here --resume" in told
        assert job_fields(mine.slurm, allocated(mine))["JobState"] == "RUNNING"
        assert steps(mine) == []
        mine.slurm.start_node(lost)
    job.slurm.restore()
    with allocation(job, 2) as mine:
        code, told = ended(here(mine, "--resume"))
        assert code == 0, told
        assert mine.losses() == uninterrupted(**SAVES)

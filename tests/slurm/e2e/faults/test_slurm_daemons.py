"""slurmctld or slurmd stops and restarts, and Slurm holds jobs that it could not start."""

import os
import signal
import time
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from orchestrator.job.hosts.scheduler_notices import NOTICES_S
from tests.e2e.job import CommandResult, wait_for
from tests.slurm.e2e.two_node_job import NAME, TESTBED_KNOBS, Job, job_on, uninterrupted
from tests.slurm.testbed import running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_a_job_keeps_training_while_slurmctld_is_dead_and_after(job: Job) -> None:
    job.submit_successfully()
    job.wait_for_step(3)
    job.slurm.stop_ctld("KILL")
    job.wait_for_step(job.last_step() + 4)
    status = job.status()
    assert (status["state"], status["leader_alive"]) == ("RUNNING", True)
    assert f"Slurm job {status['scheduler'].split()[-1]}" == status["scheduler"]
    job.slurm.start_ctld()
    job.wait_for_end()
    assert job.losses() == uninterrupted()
    job.assert_succeeded_without_incident()
    assert len(job.events("LeaderStarted")) == 1
    assert job.slurm_job()["JobState"] == "COMPLETED"


@pytest.mark.slow
def test_a_job_keeps_training_while_slurmd_is_stopped_for_an_upgrade(
    slurm_available: None, tmp_path: Path
) -> None:
    knobs = {**TESTBED_KNOBS, "TB_SLURMD_TIMEOUT": "60"}
    with (
        running_testbed(nodes=2, gpus=1, knobs=knobs) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        job.submit_successfully(**{"train.steps": "5000"})
        job.wait_for_step(3)
        os.kill(int((testbed.folder / "run" / "slurmd-node2.pid").read_text()), signal.SIGTERM)
        testbed.wait_for("slurmctld to miss it", lambda: testbed.node_state("node2")[-1] == "*")
        seen = time.monotonic()
        job.wait_until("the leader to have asked", lambda: time.monotonic() - seen > NOTICES_S + 3)
        assert testbed.node_state("node2").endswith("*")
        testbed.start_node("node2")
        testbed.wait_for("slurmd", lambda: testbed.node_state("node2") == "allocated")
        job.wait_for_step(job.last_step() + 2)
        assert not job.events("HostFlagged")
        assert len(job.actions_of_kind("StartAttempt")) == 1
        assert job("cancel", NAME).code == exit_codes.OK
        job.wait_until_gone()


def restart_slurmctld(job: Job) -> None:
    """Starts slurmctld and waits until all nodes have registered."""
    slurm = job.slurm
    slurm.start_ctld()
    known = ("idle", "allocated", "mixed")
    slurm.wait_for("all nodes", lambda: all(slurm.node_state(n) in known for n in slurm.names))


@pytest.mark.slow
def test_submit_while_slurmctld_is_down_leaves_nothing_behind(job: Job) -> None:
    job.slurm.stop_ctld("KILL")
    done = job.submit()
    assert done.code == exit_codes.BACKEND, done.out + done.err
    assert "Slurm does not answer" in done.err
    assert "scontrol ping" in done.err
    restart_slurmctld(job)
    assert not job.ids()
    job.submit_successfully()
    job.slurm.output_of("scancel", job.id)


SBATCH = """#!/bin/sh
case "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac
{before}
said=$(/usr/bin/sbatch "$@"); code=$?
{after}
exit $code
"""
LOST = 'echo "sbatch: error: Unable to contact slurm controller (connect failure)" >&2; code=1'


def submit_with_fake_sbatch(job: Job, tmp_path: Path, before: str, after: str) -> CommandResult:
    """Submits with the real sbatch and shell commands before and after it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "sbatch"
    script.write_text(SBATCH.format(before=before, after=after))
    script.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return job.with_environ(PATH=path).submit()


def stop_slurmctld_command(job: Job) -> str:
    """A shell command that ends slurmctld, which saves its state first."""
    pid = (job.slurm.folder / "run" / "slurmctld.pid").read_text().strip()
    return f"kill -TERM {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.1; done"


@pytest.mark.slow
@pytest.mark.parametrize("queued", [False, True], ids=["not queued", "queued, answer lost"])
def test_submit_reports_a_crash_of_slurmctld(job: Job, tmp_path: Path, queued: bool) -> None:
    other = job.slurm.output_of("sbatch", "--parsable", "-N2", "-o/dev/null", "--wrap", "sleep 600")
    state = ("squeue", "-h", "-o", "%T", "-j", other)
    wait_for(lambda: job.slurm.output_of(*state) == "RUNNING", "the other job to run")
    stop = stop_slurmctld_command(job)
    before, after = ("", f"{stop}; {LOST}") if queued else (stop, 'echo "$said"')
    done = submit_with_fake_sbatch(job, tmp_path, before, after)
    assert done.code == exit_codes.BACKEND, done.out + done.err
    assert "Slurm does not answer" in done.err
    restart_slurmctld(job)
    assert job.slurm.output_of(*state) == "RUNNING"

    again = job.submit()
    assert again.code == exit_codes.BAD_JOB_STATE, again.out + again.err
    assert len(job.ids()) == queued
    resumed = job.submit("--resume")
    assert resumed.code == (exit_codes.BAD_JOB_STATE if queued else exit_codes.OK), resumed.err
    assert len(job.ids()) == 1
    assert job.status()["state"] == "PENDING"
    assert job("cancel", NAME).code == exit_codes.OK
    assert not job.ids_in_queue()
    assert job.status()["state"] == "CANCELLED"


@pytest.mark.slow
def test_a_second_job_of_a_launch_does_not_disturb_the_one_that_trains(
    slurm_available: None, tmp_path: Path
) -> None:
    """This happens when slurmctld processes a submission after sbatch timed out."""
    with (
        running_testbed(nodes=4, gpus=1, knobs=TESTBED_KNOBS) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        job.submit_successfully()
        job.wait_for_step(2)
        script = job.run_dir / "slurm" / "launch-1" / "submission.sh"
        second = testbed.output_of("sbatch", "--parsable", str(script)).strip()
        wait_for(lambda: second not in job.ids_in_queue(), "the second job to end")
        assert not job.has_ended()
        left = testbed.output_of("scontrol", "show", "job", "-o", second)
        assert "JobState=FAILED" in left
        assert "Restarts=0" in left
        job.wait_for_end()
        job.assert_succeeded_without_incident()
        assert len(job.events("LeaderStarted")) == 1
        assert job.losses() == uninterrupted()


def test_status_explains_a_job_that_slurm_holds(slurm_available: None, tmp_path: Path) -> None:
    """Slurm holds a job that it could not start, here because its Prolog fails."""
    broken, prolog = tmp_path / "broken", tmp_path / "prolog.sh"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {broken} ]\n")
    prolog.chmod(0o755)
    broken.touch()
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    knobs = {**TESTBED_KNOBS, "TB_EXTRA": f"{TESTBED_KNOBS['TB_EXTRA']}\nProlog={prolog}"}
    with (
        running_testbed(nodes=2, gpus=1, knobs=knobs) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        job.submit_successfully()
        held = "launch_failed_requeued_held"
        testbed.wait_for("the job to be held", lambda: job.slurm_job()["Reason"] == held)
        status = job.status()
        assert status["state"] == "PENDING"
        first, *_ = job("status", NAME).out.splitlines()
        assert f"`scontrol release {job.id}`" in first
        assert "administrators" in first
        assert job.submit().code in (exit_codes.BAD_JOB_STATE, exit_codes.NO_PLAN)
        assert len(job.ids()) == 1

        broken.unlink()
        drained = [name for name in testbed.names if testbed.node_state(name) != "idle"]
        for name in drained:
            testbed.output_of("scontrol", "update", f"NodeName={name}", "State=RESUME")
        testbed.output_of("scontrol", "release", job.id)
        job.wait_until("a leader", lambda: job.events("LeaderStarted"))
        assert len(job.ids()) == 1
        assert job("cancel", NAME).code == exit_codes.OK
        job.wait_until_gone()


@pytest.mark.slow
def test_status_names_the_command_that_releases_a_held_job(job: Job) -> None:
    job.slurm.output_of("sbatch", "-N2", "-o/dev/null", "--wrap", "sleep 600")
    job.submit_successfully()
    job.slurm.output_of("scontrol", "uhold", job.id)
    wait_for(lambda: job.slurm_job()["Reason"] == "JobHeldUser", "the hold")
    first, *_ = job("status", NAME).out.splitlines()
    assert f"`scontrol release {job.id}`" in first
    assert job("cancel", NAME).code == exit_codes.OK
    job.wait_until_gone()

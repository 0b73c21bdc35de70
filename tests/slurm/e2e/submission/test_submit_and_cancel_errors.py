"""Slurm refuses submissions, and cancel commands do not reach it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator.contract.files import exit_codes
from tests.slurm.e2e.slurm_job import SlurmNdctl
from tests.slurm.testbed import ENDED

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(300)]

TOO_MUCH_MEMORY = '["--mem-per-cpu=800G"]'
"""More memory than a node has. ndctl does not check this option."""


def assert_nothing_was_created(ndctl: SlurmNdctl) -> None:
    made = ndctl.run_root.rglob("*") if ndctl.run_root.exists() else ()
    assert list(made) == []
    assert ndctl.testbed.output_of("squeue", "-h") == ""
    assert ndctl("status", "e2e").code == exit_codes.BAD_JOB_STATE


@pytest.mark.parametrize(
    ("key", "value", "output"),
    [
        ("cpus_per_task", "64", "cpus_per_task: must be at most 2, the CPUs of the largest node"),
        ("mem", "900G", "mem: must be at most 20000M, the memory of the largest node"),
        ("sbatch_args", TOO_MUCH_MEMORY, "Requested node configuration is not available"),
    ],
)
def test_a_request_that_no_node_can_meet_is_an_error_of_submit(
    ndctl: SlurmNdctl, key: str, value: str, output: str
) -> None:
    done = ndctl.submit(**{f"cluster__slurm__{key}": value})
    assert (done.code, output in done.err) == (exit_codes.BACKEND, True), done.err
    assert_nothing_was_created(ndctl)


def test_a_job_that_sbatch_refuses_leaves_no_name_and_no_file(ndctl: SlurmNdctl) -> None:
    """One node is drained, so ndctl cannot know that the job would not run with it either."""
    ndctl.testbed.output_of("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=fan")
    done = ndctl.submit(cluster__slurm__sbatch_args=TOO_MUCH_MEMORY)
    assert done.code == exit_codes.BACKEND
    assert "the job may wait for nodes that are down, drained or reserved: node1" in done.err
    assert "Slurm refused this job: sbatch: error: Memory specification can not be" in done.err
    assert_nothing_was_created(ndctl)

    assert ndctl.submit().code == 0, "the name is free"
    assert ndctl("cancel", "e2e").code == 0


@contextmanager
def without_slurmctld(ndctl: SlurmNdctl) -> Iterator[None]:
    ndctl.testbed.stop_ctld()
    try:
        yield
    finally:
        ndctl.testbed.start_ctld()
        ndctl.testbed.wait_for("slurmctld", lambda: ndctl.testbed.output_of("squeue"))


@pytest.mark.slow
def test_a_job_cancelled_while_slurmctld_is_down_ends_as_it_starts(ndctl: SlurmNdctl) -> None:
    slurm = ndctl.testbed
    other = slurm.output_of(
        "sbatch", "--parsable", "-N4", "--exclusive", "-o/dev/null", "--wrap=sleep 600"
    )
    slurm.wait_for("the other job", lambda: slurm.output_of("squeue", "-h", "-t", "R"))
    assert ndctl.submit().code == 0
    job_id = ndctl.job_id
    with without_slurmctld(ndctl):
        done = ndctl("cancel", "e2e")
    assert done.code == exit_codes.BACKEND
    assert "e2e is recorded as CANCELLED, but its scheduler was not reached" in done.err
    assert f"may still have Slurm job {job_id}" in done.err
    assert ndctl.slurm_job()["JobState"] == "PENDING"

    slurm.output_of("scancel", other)
    slurm.wait_for("its end", lambda: ndctl.slurm_job()["JobState"] in ENDED)
    assert ndctl.state() == "CANCELLED"
    assert not ndctl.events("AttemptStarted")
    assert ndctl.metrics() == []


@pytest.mark.slow
def test_a_second_cancel_ends_a_job_that_the_first_did_not_reach(ndctl: SlurmNdctl) -> None:
    slurm = ndctl.testbed
    other = slurm.output_of(
        "sbatch", "--parsable", "-N4", "--exclusive", "-o/dev/null", "--wrap=sleep 600"
    )
    slurm.wait_for("the other job", lambda: slurm.output_of("squeue", "-h", "-t", "R"))
    assert ndctl.submit().code == 0
    with without_slurmctld(ndctl):
        assert ndctl("cancel", "e2e").code == exit_codes.BACKEND
    done = ndctl("cancel", "e2e")
    assert done.code == 0, done.err
    assert "e2e had already ended: CANCELLED; ended what its scheduler still had" in done.out
    assert ndctl.slurm_job()["JobState"] == "CANCELLED"
    assert ndctl("cancel", "e2e").code == exit_codes.BAD_JOB_STATE
    slurm.output_of("scancel", other)


@pytest.mark.slow
def test_cancel_says_if_the_leader_ended_the_job_without_slurm(ndctl: SlurmNdctl) -> None:
    assert ndctl.submit(train__steps="4000").code == 0
    ndctl.wait_for_step(step=3)
    job_id = ndctl.job_id
    with without_slurmctld(ndctl):
        done = ndctl("cancel", "e2e")
    assert done.code == exit_codes.BACKEND
    assert "its ranks write a checkpoint and exit" in done.out
    assert f"its scheduler was not reached and may still have Slurm job {job_id}" in done.err
    assert ndctl.state() == "CANCELLED"
    ndctl.assert_nothing_left()

    ndctl.testbed.wait_for("its end", lambda: ndctl.slurm_job()["JobState"] in ENDED)
    done = ndctl("cancel", "e2e")
    assert (done.code, f"Slurm job {job_id} is gone" in done.out) == (0, True), done.err
    assert ndctl("cancel", "e2e").code == exit_codes.BAD_JOB_STATE

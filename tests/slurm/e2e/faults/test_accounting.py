"""slurmdbd stops while a job runs: ndctl does not depend on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from tests.slurm.e2e.two_node_job import NAME, TESTBED_KNOBS, Job, job_on
from tests.slurm.testbed import NOT_RUN, SlurmTestbed, running_testbed, why_no_slurm

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

ACCOUNTING = {"TB_DBD": "1"}
TRAINING = 3


@pytest.fixture
def cluster_with_slurmdbd(slurm_available: None) -> Iterator[SlurmTestbed]:
    why = why_no_slurm(**ACCOUNTING)
    if why is not None:
        pytest.skip(f"{NOT_RUN}{why}")
    with running_testbed(nodes=2, gpus=1, knobs={**TESTBED_KNOBS, **ACCOUNTING}) as testbed:
        yield testbed


def runs_on_record(slurm: SlurmTestbed) -> list[str]:
    """Every run of every job in slurmdbd, for example `3 REQUEUED`."""
    asked = ("sacct", "-n", "-X", "-D", "-P", "--starttime=now-1hours", "-o", "JobID,State")
    lines = slurm.output_of(*asked).splitlines()
    return [" ".join(line.replace("|", " ").split()[:2]) for line in lines]


def assert_all_views_show(job: Job, state: str) -> None:
    """Every view shows the state and the Slurm job."""
    status = job.status()
    assert (status["state"], status["scheduler"]) == (state, f"Slurm job {job.id}")
    listed = job("list")
    assert listed.code == exit_codes.OK, listed.err
    assert state in listed.out


def test_a_job_is_shown_requeued_and_cancelled_without_slurmdbd(
    cluster_with_slurmdbd: SlurmTestbed, tmp_path: Path
) -> None:
    with job_on(cluster_with_slurmdbd, tmp_path / "runs") as job:
        job.submit_successfully(**{"train.steps": "5000"})
        job.wait_for_step(TRAINING)
        cluster_with_slurmdbd.wait_for(
            "the record", lambda: runs_on_record(cluster_with_slurmdbd) == [f"{job.id} RUNNING"]
        )

        cluster_with_slurmdbd.stop_dbd("KILL")
        assert cluster_with_slurmdbd(["sacct", "-n"]).code != 0
        assert_all_views_show(job, "RUNNING")
        again = job.submit()
        assert again.code == exit_codes.BAD_JOB_STATE, again.out + again.err

        cluster_with_slurmdbd.output_of("scontrol", "requeue", job.id)
        job.wait_until("its second run", lambda: len(job.events("LeaderStarted")) == 2)
        job.wait_for_step(job.last_step() + 2, attempt=2)
        job.assert_resumed_without_lost_step(attempt=2)
        assert_all_views_show(job, "RUNNING")
        assert job("cancel", NAME).code == exit_codes.OK
        assert not job.ids_in_queue()
        assert job.status()["state"] == "CANCELLED"

        cluster_with_slurmdbd.start_dbd()
        # There is no other job and no third run. The final state depends on whether Slurm first saw
        # the end of the agents or the scancel.
        ends = [[f"{job.id} REQUEUED", f"{job.id} {end}"] for end in ("COMPLETED", "CANCELLED")]
        cluster_with_slurmdbd.wait_for(
            "the record", lambda: runs_on_record(cluster_with_slurmdbd) in ends
        )

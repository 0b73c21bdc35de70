"""A job is suspended for a while, by a person or by gang scheduling."""

import time

import pytest

from tests.e2e.job import wait_for
from tests.slurm.e2e.two_node_job import NAME, Job, uninterrupted

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

TRAINING = 3
SUSPENDED_S = 30.0
"""Longer than `agent_timeout` and `hang_timeout`."""


def test_a_suspended_job_continues_and_no_culprit_is_named(job: Job) -> None:
    job.submit_successfully()
    job.wait_for_step(TRAINING)
    job.slurm.output_of("scontrol", "suspend", job.id)
    assert job.slurm_job()["JobState"] == "SUSPENDED"
    begun = time.monotonic()
    wait_for(lambda: time.monotonic() - begun > SUSPENDED_S, "time to pass", 2 * SUSPENDED_S)
    output = job("status", NAME).out
    assert "SUSPENDED" in output
    assert f"scontrol resume {job.id}" in output
    job.slurm.output_of("scontrol", "resume", job.id)
    job.wait_for_end()
    assert job.losses() == uninterrupted()
    job.assert_succeeded_without_incident()
    assert len(job.actions_of_kind("StartAttempt")) == 1
    assert len(job.events("LeaderStarted")) == 1


def test_cancelling_a_suspended_job_names_no_culprit(job: Job) -> None:
    job.submit_successfully()
    job.wait_for_step(TRAINING)
    job.slurm.output_of("scontrol", "suspend", job.id)
    cancelled = job("cancel", NAME)
    assert cancelled.code == 0, cancelled.err
    status = job.status()
    assert (status["state"], status["incidents"]) == ("CANCELLED", [])
    assert not job.ids_in_queue()

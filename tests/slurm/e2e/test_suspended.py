"""A person, or a scheduler that shares nodes in turns, stops all of a job for a while."""

import time

import pytest

from tests.e2e.job import wait_for
from tests.slurm.e2e.scheduler_job import NAME, Job, uninterrupted

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

TRAINING = 3
SUSPENDED_S = 30.0
"""Longer than `agent_timeout`, and than the limit of a hang."""


def test_a_suspended_job_continues_and_no_culprit_is_named(job: Job) -> None:
    job.submitted()
    job.until_step(TRAINING)
    job.slurm.told("scontrol", "suspend", job.id)
    assert job.shown()["JobState"] == "SUSPENDED"
    begun = time.monotonic()
    wait_for(lambda: time.monotonic() - begun > SUSPENDED_S, "time to pass", 2 * SUSPENDED_S)
    said = job("status", NAME).out
    assert "SUSPENDED" in said
    assert f"scontrol resume {job.id}" in said
    job.slurm.told("scontrol", "resume", job.id)
    job.until_ended()
    assert job.losses() == uninterrupted()
    job.assert_blameless()
    assert len(job.decided("StartAttempt")) == 1
    assert len(job.events("LeaderStarted")) == 1

"""A host returns late: the job continues without it and later adds it again."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left, processes_of, wait_for

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]

AXES = {"resilience__shrink": "true", "resilience__min_hosts": "1"}
LOSS_TOLERANCE = 0.02
"""Tolerance between losses of two meshes over these steps; other data would differ by more."""


@contextmanager
def stopped_as_it_starts(ndctl: Ndctl) -> Iterator[int]:
    """Stops the next agent of host-1, so that it does not register until the end of the block."""
    (first,) = agents(ndctl)
    pid = wait_for(lambda: next(iter(agents(ndctl) - {first}), None), "another agent of host-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def agents(ndctl: Ndctl) -> set[int]:
    return {
        pid
        for pid, command in processes_of(ndctl.run_dir).items()
        if " orchestrator.backends.entry.agent " in command and "--host=host-1 " in command
    }


@pytest.mark.slow
def test_a_host_that_returns_joins_the_job_after_a_checkpoint(
    ndctl: Ndctl, reference: Ndctl
) -> None:
    # The steps after a checkpoint must take long enough for the job to be stopped in them.
    drills = ("--drill", "kill:host=1@step=12", "--drill", "slow:rank=0@step=14")
    done = ndctl.submit(*drills, **AXES)
    assert done.code == 0, done.out + done.err
    wait_for(lambda: ndctl.num_steps() >= 1, "the first step")
    with stopped_as_it_starts(ndctl):
        wait_for(lambda: len(starts(ndctl)) > 1, "a start without host-1")
    wait_for(ndctl.has_ended, "the end")
    status = ndctl.status()
    assert (status["state"], status["attempt"]) == ("SUCCEEDED", 3)
    assert [start["hosts"] for start in starts(ndctl)] == [
        ["host-0", "host-1"],
        ["host-0"],
        ["host-0", "host-1"],
    ]
    first, second, third = (event["step"] for event in ndctl.events("TrainingResumed"))
    saved = [event["step"] for event in ndctl.events("CheckpointSaved")]
    assert (first, second) == (0, 8)
    assert 16 in saved
    assert third in saved, "scaling up repeats no step"
    assert third >= 16
    (stop,) = (a for a in ndctl.actions() if a["kind"] == "StopAttempt" and a["attempt"] == 2)
    assert "growing from 1 to 2 hosts" in stop["reason"]
    assert "host-1 can be used again" in stop["reason"]
    (incident,) = status["incidents"]
    assert incident["kind"] == "host-lost", "scaling up is no incident"
    assert_same_training(ndctl, reference)
    assert_nothing_left(ndctl.run_dir)


def starts(ndctl: Ndctl) -> list[dict[str, object]]:
    return [action for action in ndctl.actions() if action["kind"] == "StartAttempt"]


def assert_same_training(ndctl: Ndctl, reference: Ndctl) -> None:
    """Every step was trained on the same batches as in the uninterrupted run."""
    expected = reference.losses()
    assert {metric["step"] for metric in ndctl.metrics()} == set(expected)
    for metric in ndctl.metrics():
        same = 0.0 if metric["attempt"] == 1 else LOSS_TOLERANCE
        assert metric["loss"] == pytest.approx(expected[metric["step"]], abs=same), metric

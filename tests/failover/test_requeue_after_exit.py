"""An allocation in which no agent is left: queued again once, and only where nobody else has."""

import logging
import time
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, LaunchPlan
from orchestrator.contract.messages.events import (
    CancelRequested,
    CheckpointSaved,
    Event,
    LeaderStarted,
    LeaveAsked,
    StepReached,
)
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.failover.after_leader import UNLED
from orchestrator.failover.requeue_after_exit import restarts_in_vain, see_to_the_job
from orchestrator.job.transitions import fold
from tests.agent.world import LAUNCH, TurnedClock, a_job
from tests.failover.test_leader_lost import Queue, append, began

KILLED = 137


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    append(run_dir, a_job(tmp_path), began("host-0"))
    return run_dir


def seen(run_dir: RunDir, queue: Queue, restarts: int = 0, launch: int = LAUNCH) -> int:
    """The exit code of the allocation."""
    term = Term(launch, restarts)
    return see_to_the_job(run_dir, term, KILLED, lambda name: queue, TurnedClock())


def test_the_job_is_queued_again_and_no_host_is_left_out(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue()
    with caplog.at_level(logging.INFO):
        assert seen(run_dir, queue) == KILLED
    assert queue.requeued == [()]
    assert f"what started them ended with code {KILLED}" in caplog.text


def test_a_scheduler_that_does_not_answer_is_asked_until_it_does(run_dir: RunDir) -> None:
    silent = Unanswered("Slurm does not answer")
    queue = Queue(says=lambda before: silent if before < 5 else None)
    seen(run_dir, queue)
    assert queue.requeued == [()] * 6


@pytest.mark.parametrize("says", [Ended("Slurm job 7 has ended"), None])
def test_it_is_asked_once(run_dir: RunDir, says: BackendError | None) -> None:
    queue = Queue(says=lambda before: says)
    seen(run_dir, queue)
    assert len(queue.requeued) == 1


def test_a_job_that_has_ended_ends_as_it_did(run_dir: RunDir) -> None:
    unable = LeaderStarted(at=time.time(), host="host-0", pid=1, unable="no Slurm in here")
    append(run_dir, unable)
    queue = Queue()
    assert seen(run_dir, queue) == exit_codes.FAILED
    assert queue.requeued == []


def test_a_job_that_was_cancelled_ends_well(run_dir: RunDir) -> None:
    append(run_dir, CancelRequested(at=time.time(), by="me"))
    queue = Queue()
    assert seen(run_dir, queue) == exit_codes.OK
    assert queue.requeued == []


def test_a_job_that_is_of_another_launch_or_has_other_hosts_is_left_alone(run_dir: RunDir) -> None:
    class Rivalled(Queue):
        def rival(self, launch: LaunchPlan) -> str | None:
            return "Slurm job 8 is RUNNING"

    other, rivalled = Queue(), Rivalled()
    assert seen(run_dir, other, launch=LAUNCH - 1) == KILLED
    assert seen(run_dir, rivalled) == KILLED
    assert other.requeued == rivalled.requeued == []


def test_runs_of_which_nothing_comes_have_an_end(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue()
    append(run_dir, began("host-0", 0))
    for restarts in range(UNLED - 1):
        seen(run_dir, queue, restarts)
        append(run_dir, began("host-0", restarts + 1))
    assert len(queue.requeued) == UNLED - 1
    assert seen(run_dir, queue, UNLED - 1) == KILLED
    assert len(queue.requeued) == UNLED - 1
    assert f"nothing came of {UNLED} allocations in a row" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("event", "in_vain"),
    [
        (CheckpointSaved(at=2.0, attempt=0, step=4), 1),
        (LeaveAsked(at=2.0, cause="preempted", words="SIGTERM"), 2),
        (StepReached(at=2.0, attempt=0, step=4, loss=None, tokens_per_second=None), 2),
    ],
)
def test_runs_are_in_vain_until_a_new_checkpoint(event: Event, in_vain: int) -> None:
    granted = Allocation(id="7", restarts=5, hosts=("host-0", "host-1"))
    leader = LeaderStarted(at=1.0, host="host-0", pid=1, allocation=granted)
    events: list[Event] = [a_job(Path("/runs/job")), leader, event]
    assert restarts_in_vain(fold(events), 6) == in_vain
    later = a_job(Path("/runs/job"), resume=True)
    assert restarts_in_vain(fold([*events, later]), 5) == 6, "a person gave it another chance"

"""When no agent is left in an allocation, the job is requeued once, unless it has other hosts."""

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
from tests.failover.test_leader_lost import FakeQueue, append, leader_started

KILLED = 137
SAID = ": srun: error: Invalid MPI type 'pmix' (from /runs/job/slurm/launch-1/7_batch.out)"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    append(run_dir, a_job(tmp_path), leader_started("host-0"))
    return run_dir


def exit_code_of(run_dir: RunDir, queue: FakeQueue, restarts: int = 0, launch: int = LAUNCH) -> int:
    """Exit code of the allocation after its agents have ended."""
    term = Term(launch, restarts)
    return see_to_the_job(run_dir, term, KILLED, SAID, lambda name: queue, TurnedClock())


def test_the_job_is_queued_again_and_no_host_is_excluded(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = FakeQueue()
    with caplog.at_level(logging.INFO):
        assert exit_code_of(run_dir, queue) == KILLED
    assert queue.requeued == [()]
    assert f"the command that started them ended with exit code {KILLED}{SAID}" in caplog.text


def test_the_requeue_is_repeated_until_the_scheduler_answers(run_dir: RunDir) -> None:
    silent = Unanswered("Slurm does not answer")
    queue = FakeQueue(answer=lambda before: silent if before < 5 else None)
    exit_code_of(run_dir, queue)
    assert queue.requeued == [()] * 6


@pytest.mark.parametrize("answer", [Ended("Slurm job 7 has ended"), None])
def test_an_answered_requeue_is_requested_once(
    run_dir: RunDir, answer: BackendError | None
) -> None:
    queue = FakeQueue(answer=lambda before: answer)
    exit_code_of(run_dir, queue)
    assert len(queue.requeued) == 1


def test_a_failed_job_exits_with_its_code(run_dir: RunDir) -> None:
    unable = LeaderStarted(at=time.time(), host="host-0", pid=1, unable="no Slurm in here")
    append(run_dir, unable)
    queue = FakeQueue()
    assert exit_code_of(run_dir, queue) == exit_codes.FAILED
    assert queue.requeued == []


def test_a_cancelled_job_exits_with_0(run_dir: RunDir) -> None:
    append(run_dir, CancelRequested(at=time.time(), by="me"))
    queue = FakeQueue()
    assert exit_code_of(run_dir, queue) == exit_codes.OK
    assert queue.requeued == []


def test_a_job_with_another_launch_or_other_hosts_is_not_requeued(run_dir: RunDir) -> None:
    class QueueWithRival(FakeQueue):
        def rival(self, launch: LaunchPlan) -> str | None:
            return "Slurm job 8 is RUNNING"

    other, with_rival = FakeQueue(), QueueWithRival()
    assert exit_code_of(run_dir, other, launch=LAUNCH - 1) == KILLED
    assert exit_code_of(run_dir, with_rival) == KILLED
    assert other.requeued == with_rival.requeued == []


def test_allocations_without_a_checkpoint_are_limited(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = FakeQueue()
    append(run_dir, leader_started("host-0", 0))
    for restarts in range(UNLED - 1):
        exit_code_of(run_dir, queue, restarts)
        append(run_dir, leader_started("host-0", restarts + 1))
    assert len(queue.requeued) == UNLED - 1
    assert exit_code_of(run_dir, queue, UNLED - 1) == KILLED
    assert len(queue.requeued) == UNLED - 1
    assert f"no new checkpoint in {UNLED} allocations in a row" in caplog.messages[-1]
    assert f"ended with exit code {KILLED}{SAID}; fix the cause" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (CheckpointSaved(at=2.0, attempt=0, step=4), 1),
        (LeaveAsked(at=2.0, cause="preempted", words="SIGTERM"), 2),
        (StepReached(at=2.0, attempt=0, step=4, loss=None, tokens_per_second=None), 2),
    ],
)
def test_restarts_are_counted_until_a_new_checkpoint(event: Event, expected: int) -> None:
    granted = Allocation(id="7", restarts=5, hosts=("host-0", "host-1"))
    leader = LeaderStarted(at=1.0, host="host-0", pid=1, allocation=granted)
    events: list[Event] = [a_job(Path("/runs/job")), leader, event]
    assert restarts_in_vain(fold(events), 6) == expected
    later = a_job(Path("/runs/job"), resume=True)
    assert restarts_in_vain(fold([*events, later]), 5) == 6, "submitting again resets the count"

"""Resumes from the memory of hosts: what counts as progress, and which copies may be used."""

from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.messages.actions import Action, StartAttempt
from orchestrator.contract.messages.events import LeaveAsked, MemoryCheckpointsSet, TrainingResumed
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.job.state import pace_of
from tests.job.job_driver import Job, submitted


def remembers(job: Job, step: int) -> None:
    """The present attempt resumes from memory, and does one step."""
    attempt = job.run.attempt.number
    job.tell(TrainingResumed(at=job.now(), attempt=attempt, step=step, in_memory=True))
    job.steps(step + 1)


def started(actions: tuple[Action, ...]) -> StartAttempt:
    (start,) = (action for action in actions if isinstance(action, StartAttempt))
    return start


def test_copies_are_used_until_training_starts_from_the_disk_again() -> None:
    job = Job(in_memory=True, max_restarts=9)
    assert [job.run.progress.lineage] == [0]
    job.running()
    assert started(job.fails_once()).lineage == 1, "attempt 1 started at step 0"
    remembers(job, 7)
    assert started(job.fails_once()).lineage == 1, "attempt 2 went on with its copies"
    job.trains(first=5)
    assert started(job.fails_once()).lineage == 3, "attempt 3 read the disk"


def test_a_copy_is_no_checkpoint_but_its_step_counts_as_progress() -> None:
    job = Job(in_memory=True, max_restarts=2).running()
    for step in (7, 9, 11, 13, 15):
        job.fails_once()
        remembers(job, step)
    progress = job.run.progress
    assert (progress.saved, progress.saves, progress.remembered) == (0, (), 15)
    assert job.run.ending is None, "each attempt came further than the one before"


def test_failing_again_and_again_at_one_step_spends_the_budget() -> None:
    job = Job(in_memory=True, max_restarts=2).running()
    while job.run.ending is None and job.run.attempt.number < 9:
        job.fails_once()
        remembers(job, 7)
    assert job.run.ending == "FAILED"
    assert job.run.attempt.number <= 4


def test_lost_steps_are_counted_from_the_copy() -> None:
    job = Job(in_memory=True).running()
    job.saves(20)
    job.steps(33)
    job.fails_once(step=33)
    (incident,) = job.run.history.incidents
    assert "the newest step in memory, else from checkpoint step-20" in incident.action
    remembers(job, 32)
    (incident,) = job.run.history.incidents
    assert (incident.step, incident.saved) == (33, 32)


def test_an_incident_keeps_which_checkpoints_were_passed_over() -> None:
    job = Job(in_memory=True).running()
    job.steps(33)
    job.fails_once(step=33)
    damaged = SkippedCheckpoint("step-33", "the slot of rank 2 has other bytes than its checksum")
    attempt = job.run.attempt.number
    resumed = TrainingResumed(at=job.now(), attempt=attempt, step=32, passed_over=(damaged,))
    job.tell(replace(resumed, in_memory=True))
    job.steps(33)
    job.saves(40)
    (incident,) = job.run.history.incidents
    assert incident.skipped == (damaged,)
    assert incident.in_memory


def test_failures_that_memory_covered_are_counted_for_the_interval_of_the_disk() -> None:
    job = Job(in_memory=True, max_restarts=9).running()
    job.fails_once()
    remembers(job, 7)
    job.fails_once()
    job.trains(first=5)
    exposure = pace_of(job.run).exposure
    assert (exposure.failures, exposure.in_memory) == (2, 1)
    assert exposure.on_disk == 2 / 4


def keeps(job: Job, copies: int | None) -> None:
    attempt = job.run.attempt.number
    job.tell(MemoryCheckpointsSet(at=job.now(), attempt=attempt, copies=copies, why="no room"))


def test_nothing_is_expected_of_memory_once_ranks_keep_nothing_there() -> None:
    job = Job(in_memory=True, copies=2, max_restarts=9).running()
    assert job.run.copies_in_memory == 2
    keeps(job, 1)
    assert job.run.copies_in_memory == 1
    keeps(job, None)
    assert job.run.copies_in_memory is None
    reason = started(job.fails_once()).reason
    assert "memory" not in reason + job.run.history.incidents[0].action
    assert job.run.copies_in_memory == 2, "the next attempt decides again"


def test_a_job_that_is_submitted_again_or_requeued_expects_nothing_of_memory() -> None:
    """Its agents have ended, and the memory of the new ones is empty."""
    job = Job(in_memory=True, copies=1).granted().running()
    job.saves(20)
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    job.stops()
    reason = job.granted(restarts=1).starts().run.stage.reason
    assert reason == "attempt 2 on 2 hosts from checkpoint step-20"
    job.cancelled()
    job.stops()
    job.tell(submitted(at=job.now(), resume=True, in_memory=True, copies=1))
    job.starts()
    assert job.run.stage.reason == "attempt 3 on 2 hosts from checkpoint step-20"
    assert "from the newest step in its hosts' memory" in started(job.fails_once()).reason


def test_a_program_of_the_user_keeps_nothing_in_memory_until_it_says_so() -> None:
    job = Job(in_memory=True, copies=1, run=RunSpec(script="train.py")).running()
    assert job.run.copies_in_memory is None
    keeps(job, 1)
    assert job.run.copies_in_memory == 1

"""A person cancels a job with scancel or `ndctl cancel`, in each stage of the job."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.job import CommandResult, processes_of, wait_for
from tests.slurm.e2e.two_node_job import NAME, Job, uninterrupted

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(600)]

TRAINING = 3
BAD_STATE = 5


# Ways to cancel


def scancel(job: Job) -> None:
    job.slurm.output_of("scancel", job.id)


def ndctl_cancel(job: Job) -> None:
    done = job("cancel", NAME)
    assert done.code == 0, done.err
    assert not job.ids_in_queue(), "the job has ended when the command returns"
    assert not processes_of(job.run_dir)


# Stages of the job


@contextlib.contextmanager
def pending(job: Job) -> Iterator[None]:
    """Another job uses the nodes."""
    other = job.slurm.output_of("sbatch", "--parsable", "-N2", "-o/dev/null", "--wrap", "sleep 600")
    running = ("squeue", "-h", "-o", "%T", "-j", other)
    job.slurm.wait_for("the other job", lambda: job.slurm.output_of(*running) == "RUNNING")
    job.submit_successfully()
    wait_for(
        lambda: job.slurm_job().get("Reason") in ("Resources", "Priority"), "the job to be queued"
    )
    yield
    job.slurm.output_of("scancel", other)


@contextlib.contextmanager
def before_the_agents(job: Job) -> Iterator[None]:
    """Slurm has granted the nodes, and the site's setup commands run."""
    begun = job.run_root / "begun"
    lines = f'["touch {begun}; sleep 600"]'
    job.submit_successfully(**{"cluster.slurm.setup": lines})
    job.wait_until("the setup commands", begun.exists)
    yield


@contextlib.contextmanager
def waiting_for_agents(job: Job) -> Iterator[None]:
    """The leader runs, and the other agent finds its host locked by another agent."""
    logs = job.run_dir / "logs"
    logs.mkdir(parents=True)
    with (logs / "agent-node2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job.submit_successfully()
        job.wait_until("the leader's own agent", lambda: job.events("AgentRegistered"))
        assert not job.actions_of_kind("StartAttempt")
        yield


@contextlib.contextmanager
def training(job: Job) -> Iterator[None]:
    job.submit_successfully()
    job.wait_for_step(TRAINING)
    yield


@contextlib.contextmanager
def stopping(job: Job) -> Iterator[None]:
    """Ranks were told to stop, and one of them does not stop yet."""
    with training(job):
        ranks = job.ranks()
        os.kill(ranks[1], signal.SIGSTOP)
        job.slurm.output_of("scancel", "--signal=USR1", job.id)
        job.wait_until("the leader to receive the signal", lambda: job.events("LeaveAsked"))
        assert not job.actions_of_kind("Requeue")
        yield
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[1], signal.SIGCONT)


@contextlib.contextmanager
def being_requeued(job: Job) -> Iterator[None]:
    """Slurm requeues the job, whose setup commands ignore SIGTERM until the kill wait is over."""
    begun = job.run_root / "begun"
    lines = f"""["trap '' TERM; touch {begun}; while :; do sleep 1; done"]"""
    job.submit_successfully(**{"cluster.slurm.setup": lines})
    job.wait_until("the setup commands", begun.exists)
    job.slurm.output_of("scontrol", "requeue", job.id)
    job.slurm.wait_for(
        "the job to be COMPLETING", lambda: job.slurm_job()["JobState"] == "COMPLETING"
    )
    yield


@contextlib.contextmanager
def waiting_after_requeue(job: Job) -> Iterator[None]:
    """The job was requeued and waits for its BeginTime; it has no process."""
    with before_the_agents(job):
        job.slurm.output_of("scontrol", "requeue", job.id)
        job.slurm.wait_for("the queue", lambda: job.slurm_job()["Reason"] == "BeginTime")
        yield


Stage = Callable[[Job], contextlib.AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("stage", "cancel"),
    [
        (pending, scancel),
        pytest.param(pending, ndctl_cancel, marks=pytest.mark.slow),
        pytest.param(before_the_agents, scancel, marks=pytest.mark.slow),
        pytest.param(before_the_agents, ndctl_cancel, marks=pytest.mark.slow),
        pytest.param(waiting_for_agents, scancel, marks=pytest.mark.slow),
        pytest.param(waiting_for_agents, ndctl_cancel, marks=pytest.mark.slow),
    ],
)
def test_a_job_cancelled_before_any_step_ends(
    job: Job, stage: Stage, cancel: Callable[[Job], None]
) -> None:
    with stage(job):
        assert_refused(job.submit(), job)
        cancel(job)
        job.wait_until_gone()
    assert job.slurm_job()["JobState"] == "CANCELLED"
    status = job.status()
    assert status["state"] == "CANCELLED", status
    assert "--resume" in job("status", NAME).out
    assert_refused(job.submit(), job)
    assert len(job.ids()) == 1, "there is no second job"


def assert_refused(done: CommandResult, job: Job) -> None:
    """A second submission changes nothing."""
    assert done.code == BAD_STATE, done.out + done.err
    assert len(job.ids()) == 1


# In every run tests/e2e/test_recovery.py has a job that is cancelled and resumed.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "cancel"),
    [(training, scancel), (training, ndctl_cancel), (stopping, scancel)],
)
def test_a_job_cancelled_in_training_can_be_resumed(
    job: Job, stage: Stage, cancel: Callable[[Job], None]
) -> None:
    with stage(job):
        assert_refused(job.submit(), job)
        cancel(job)
    job.wait_until_gone()
    status = job.status()
    assert (status["state"], status["incidents"]) == ("CANCELLED", [])
    assert not job.actions_of_kind("Requeue")
    left_at = status["checkpoint"]["step"]
    assert left_at >= TRAINING

    job.submit_successfully("--resume")
    job.wait_for_end()
    assert job.losses() == uninterrupted()
    job.assert_succeeded_without_incident()
    assert job.events("TrainingResumed")[-1]["step"] == left_at
    assert len(job.ids()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "cancel"),
    [
        (waiting_after_requeue, scancel),
        (waiting_after_requeue, ndctl_cancel),
        (being_requeued, ndctl_cancel),
    ],
)
def test_a_job_cancelled_while_it_is_requeued_ends(
    job: Job, stage: Stage, cancel: Callable[[Job], None]
) -> None:
    """An scancel alone has no effect on a job that is being requeued."""
    with stage(job):
        cancel(job)
        job.wait_until_gone()
    shown = job.slurm_job()
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "1")
    status = job.status()
    assert (status["state"], status["incidents"]) == ("CANCELLED", [])
    assert len(job.ids()) == 1, "there is no second job"

"""A job ends after `max_allocations` allocations in a row without a new checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.launch import Cause
from orchestrator.contract.messages.actions import Action, EndJob, Requeue, StartAttempt
from orchestrator.contract.messages.events import LeaveAsked
from orchestrator.job.stage import OUTSIDE
from orchestrator.job.transitions import fold
from tests.job.job_driver import Job, submitted

LIMIT = 3


def scheduled_job(**more: Any) -> Job:
    """Its hosts are pinned, so no failure excludes one."""
    job = Job(max_allocations=LIMIT, backend="slurm", **more).granted()
    job.always = job.hosts
    return job


def leaves(job: Job, cause: Cause) -> tuple[Action, ...]:
    """The scheduler ends the allocation; ranks stop if there are any."""
    actions = job.tell(LeaveAsked(at=job.now(), cause=cause, words="SIGUSR2"))
    return actions if isinstance(job.run.stage, OUTSIDE) else job.stops()


def reaches_time_limit_without_agents(job: Job) -> tuple[Action, ...]:
    job.leads()
    return leaves(job, "time-limit")


def is_preempted_while_starting(job: Job) -> tuple[Action, ...]:
    job.starts()
    return leaves(job, "preempted")


def waits_for_missing_agents(job: Job) -> tuple[Action, ...]:
    job.leads()
    job.registers("host-0")
    return job.waits(700)


def loses_a_host(job: Job) -> tuple[Action, ...]:
    job.running()
    job.loses("host-1")
    return job.stops("host-0") or job.waits(60)


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        (reaches_time_limit_without_agents, "the time limit of the allocation is near (SIGUSR2)"),
        (is_preempted_while_starting, "preempted by another job (SIGUSR2)"),
        (waits_for_missing_agents, "1 of 4 hosts are left, and no spare"),
        (loses_a_host, "and no spare"),
    ],
)
def test_the_third_allocation_in_a_row_without_a_checkpoint_ends_the_job(
    ends: Callable[[Job], tuple[Action, ...]], how: str
) -> None:
    job = (
        scheduled_job(hosts=4, max_restarts=9)
        if ends is waits_for_missing_agents
        else scheduled_job()
    )
    for restarts in range(LIMIT - 1):
        job.granted(restarts)
        (requeue,) = ends(job)
        assert isinstance(requeue, Requeue)
    job.granted(LIMIT - 1)
    (end,) = ends(job)
    assert isinstance(end, EndJob)
    assert end.state == "FAILED"
    assert end.reason.startswith(
        "3 allocations in a row, since 2023-11-14 22:13:21 UTC, made no new checkpoint (there is"
        " none yet); the last one ended: "
    )
    assert how in end.reason
    assert "raise cluster.slurm.time" in end.reason
    assert job.run.job is not None
    name = Path(job.run.job.launch.run_dir).name
    assert f"then resume with the command that `ndctl status {name}` shows" in end.reason
    assert f"`ndctl describe {name}` and `ndctl logs {name} --agents`" in end.reason
    assert fold(event for event, _ in job.all) == job.run, "the next leader replays the same state"


def test_submitting_again_resets_the_count() -> None:
    job = scheduled_job()
    for restarts in range(LIMIT):
        reaches_time_limit_without_agents(job.granted(restarts))
    assert job.run.state == "FAILED"
    job.tell(submitted(resume=True, max_allocations=LIMIT))
    for restarts in range(LIMIT - 1):
        (requeue,) = reaches_time_limit_without_agents(job.granted(restarts))
        assert isinstance(requeue, Requeue)


def test_a_new_checkpoint_resets_the_count() -> None:
    job = scheduled_job()
    for restarts in range(9):
        job.granted(restarts).starts()
        job.trains(first=restarts)
        job.tell(LeaveAsked(at=job.now(), cause="time-limit", words="SIGUSR2"))
        job.saves(restarts + 1)
        (requeue,) = job.stops()
        assert isinstance(requeue, Requeue)
    for restarts in range(9, 11):
        (requeue,) = reaches_time_limit_without_agents(job.granted(restarts))
        assert isinstance(requeue, Requeue)
    (end,) = reaches_time_limit_without_agents(job.granted(11))
    assert isinstance(end, EndJob)
    assert "made no new checkpoint (the newest is step-9, of 2023-11-14" in end.reason


def test_a_checkpoint_that_only_the_ranks_know_resets_the_count() -> None:
    job = scheduled_job()
    for restarts in range(9):
        job.granted(restarts).starts()
        job.trains(first=4 * restarts)
        (requeue,) = leaves(job, "preempted")
        assert isinstance(requeue, Requeue)


def test_a_job_may_succeed_before_its_first_checkpoint() -> None:
    job = scheduled_job(steps=2)
    for restarts in range(LIMIT - 1):
        is_preempted_while_starting(job.granted(restarts))
    job.granted(LIMIT - 1).running()
    (end,) = job.stops(finished=True)
    assert isinstance(end, EndJob)
    assert end.state == "SUCCEEDED"


def test_leaders_that_die_with_their_allocation_are_counted() -> None:
    """The scheduler itself queues the job again, without a decision of the job."""
    job = scheduled_job(max_restarts=9)
    for restarts in range(LIMIT):
        job.granted(restarts).running()
    job.granted(LIMIT)
    (end,) = job.leads()
    assert isinstance(end, EndJob)
    assert "the last one ended: its leader was lost while training" in end.reason
    assert [one.kind for one in job.run.history.incidents] == ["leader-lost"] * LIMIT
    assert (job.run.history.incidents[-1].remedy, job.run.history.incidents[-1].rule) == (
        "stop",
        "max-allocations",
    )


def test_allocations_in_which_no_leader_started_are_counted() -> None:
    job = scheduled_job()
    reaches_time_limit_without_agents(job)
    job.granted(LIMIT)
    (end,) = job.leads()
    assert isinstance(end, EndJob)
    assert end.reason.startswith("3 allocations in a row")
    assert "the last one ended: no leader started in it" in end.reason


def test_a_take_over_in_the_same_allocation_is_not_counted() -> None:
    job = scheduled_job(hosts=1, spares=1, max_restarts=9).running()
    for _ in range(LIMIT + 1):
        job.leads()
        assert job.run.history.allocations == 1


def test_without_a_scheduler_nothing_is_counted() -> None:
    job = Job(max_allocations=1, max_restarts=9).starts()
    for _ in range(5):
        job.starts()
    assert (job.run.history.allocations, job.run.ending) == (0, None)


def test_an_old_journal_without_max_allocations_has_no_limit() -> None:
    job = Job().granted()
    for restarts in range(9):
        (requeue,) = reaches_time_limit_without_agents(job.granted(restarts))
        assert isinstance(requeue, Requeue)


# Schedulers that replace hosts: leaders are counted instead of allocations


def test_leaders_that_die_before_each_attempt_end_the_job() -> None:
    job = Job(max_allocations=LIMIT, backend="kubernetes").granted(successor_s=600.0)
    for _ in range(LIMIT):
        assert job.leads() == ()
        job.registers("host-0")
    (end,) = job.leads()
    assert isinstance(end, EndJob)
    assert end.reason.startswith("3 leaders in a row, since 2023-11-14 22:13:21 UTC, made no new")
    assert "its leader was lost while waiting for agents" in end.reason
    assert job.run.history.incidents == ()


def test_an_attempt_resets_the_count_of_leaders() -> None:
    """A failed attempt is an incident and spends the restart budget instead."""
    job = Job(max_allocations=1, max_restarts=3, backend="kubernetes").granted(successor_s=600.0)
    job.always = job.hosts
    for _ in range(4):
        job.running()
    assert job.run.state == "RUNNING"
    assert (len(job.run.history.incidents), job.run.history.fruitless) == (3, 3)


def test_an_evicted_leader_is_not_counted() -> None:
    job = Job(max_allocations=1, backend="kubernetes").granted(successor_s=600.0)
    job.leads()
    for _ in range(5):
        assert job.leads(taken="preempted by another pod") == ()
        leaves(job, "preempted")
    job.leads()
    job.registers("host-0")
    (start,) = job.registers("host-1")
    assert isinstance(start, StartAttempt)

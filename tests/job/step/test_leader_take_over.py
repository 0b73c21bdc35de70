"""After the leader is lost, an agent of the same allocation becomes the leader."""

from typing import Any

import pytest

from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.messages.actions import (
    Action,
    ReplaceAgent,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import (
    HostsChecked,
    HostUnavailable,
    LeaderStarted,
    ProgramRuns,
    TrainingResumed,
)
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.leader_change import expected_back, takes_over
from orchestrator.job.stage import Waiting
from tests.job.job_driver import Job
from tests.job.step.test_scheduler import asks_to_leave, drains

HOW = "its host is lost: Slurm says that it is DOWN"


def allocated(**more: Any) -> Job:
    """A job that trains on three hosts; the leader is on host-0."""
    return Job(**{"hosts": 3, **more}).granted().running()


def takes_over_on(job: Job, name: str = "host-1", **more: Any) -> tuple[Action, ...]:
    """The agent of `name` becomes the leader of the same allocation."""
    return job.tell(
        LeaderStarted(
            at=job.now(),
            host=name,
            pid=7,
            allocation=job.allocation,
            exclude=job.exclude,
            former=HOW,
            **more,
        )
    )


def agents_stopped(job: Job, *names: str) -> tuple[Action, ...]:
    """Running agents register with the new leader and stop the ranks of the old attempt."""
    actions: tuple[Action, ...] = ()
    for name in names:
        (stop,) = job.registers(name)
        assert isinstance(stop, StopAttempt)
        actions = job.stops(name)
    return actions


def unavailable(job: Job, name: str) -> tuple[Action, ...]:
    return job.tell(HostUnavailable(at=job.now(), host=name, why="Slurm says that it is DOWN"))


def test_the_job_restarts_in_its_allocation_on_all_of_its_hosts() -> None:
    job = allocated()
    job.saves(5)
    (replaced,) = takes_over_on(job)
    assert isinstance(replaced, ReplaceAgent)
    assert replaced.host == "host-0"
    assert agents_stopped(job, "host-1", "host-2") == ()
    (start,) = job.registers("host-0", pid=2)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1", "host-2")
    assert (job.run.scheduler.leader, job.run.hosts.exclude, job.run.scheduler.left_out) == (
        "host-1",
        {},
        (),
    )
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit.host) == ("leader-lost", "host-0")
    assert incident.cause.endswith(HOW)
    assert job.run.history.restarts == 1


def test_a_host_that_works_is_not_blamed_for_the_end_of_its_leader() -> None:
    """Slurm, for example, ends the leader's process if another node of its step is lost."""
    job = allocated()
    takes_over_on(job, host_works=True)
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit) == ("leader-lost", NOBODY)
    agents_stopped(job, "host-1", "host-2")
    assert isinstance(job.registers("host-0", pid=2)[-1], StartAttempt)


def test_hosts_that_passed_the_common_check_are_not_checked_again() -> None:
    job = Job(hosts=2, preflight=True).granted().starts()
    job.tell(HostsChecked(at=job.now(), check=job.run.hosts.checks, unfit={}))
    job.trains()
    takes_over_on(job)
    agents_stopped(job, "host-1")
    assert isinstance(job.registers("host-0", pid=2)[-1], StartAttempt)


def test_no_rank_starts_before_all_agents_stopped_the_old_attempt() -> None:
    job = allocated()
    takes_over_on(job)
    job.registers("host-0", pid=2)
    job.registers("host-1")
    job.registers("host-2")
    job.stops("host-1")
    assert isinstance(job.run.stage, Waiting)
    assert isinstance(job.stops("host-2")[-1], StartAttempt)


def test_a_spare_replaces_the_lost_host_of_the_leader() -> None:
    job = Job(hosts=2, spares=1).granted().running()
    takes_over_on(job)
    unavailable(job, "host-0")
    agents_stopped(job, "host-1")
    (start,) = job.registers("host-2")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-2", "host-1")


def test_without_a_spare_the_requeue_excludes_only_the_host_of_the_leader() -> None:
    """It does not matter which agents have registered with the new leader by then."""
    for stopped in (("host-1", "host-2"), ("host-1",), ()):
        job = allocated()
        takes_over_on(job)
        agents_stopped(job, *stopped)
        (requeue,) = unavailable(job, "host-0")
        assert isinstance(requeue, Requeue)
        assert requeue.exclude == ("host-0",)


def test_an_agent_lost_after_the_take_over_is_replaced() -> None:
    job = allocated()
    takes_over_on(job)
    agents_stopped(job, "host-1")
    job.registers("host-0", pid=2)
    (again,) = job.loses("host-2")
    assert isinstance(again, ReplaceAgent)
    job.waits(4)
    job.registers("host-2", pid=2)
    assert [one.kind for one in job.run.history.incidents] == ["leader-lost", "host-lost"]


@pytest.mark.parametrize("lost", [True, False])
def test_a_run_of_the_job_that_ends_with_its_first_host_has_one_incident(lost: bool) -> None:
    """That host has the batch script. If it is well, something else broke the allocation."""
    job = allocated()
    takes_over_on(job)
    if lost:
        unavailable(job, "host-0")
    else:
        job.registers("host-0", pid=2)
    asks_to_leave(job, "failed")
    kinds = [incident.kind for incident in job.run.history.incidents]
    assert kinds == ["leader-lost", *([] if lost else ["allocation-broke"])]


def test_another_incident_in_between_changes_nothing() -> None:
    job = Job(hosts=2, spares=1).granted().running()
    takes_over_on(job)
    unavailable(job, "host-0")
    agents_stopped(job, "host-1")
    job.registers("host-2")
    job.fails_once()
    asks_to_leave(job, "failed")
    job.stops("host-1", "host-2")
    kinds = [incident.kind for incident in job.run.history.incidents]
    assert kinds == ["leader-lost", "rank-killed"]


@pytest.mark.parametrize("has_steps", [True, False])
def test_a_first_host_that_was_lost_long_ago_explains_no_later_end(has_steps: bool) -> None:
    def runs() -> None:
        if has_steps:
            job.trains()
        else:
            job.tell(ProgramRuns(at=job.now(), attempt=job.run.attempt.number))

    job = Job(hosts=2, spares=1).granted().starts()
    runs()
    takes_over_on(job)
    unavailable(job, "host-0")
    agents_stopped(job, "host-1")
    job.registers("host-2")
    runs()
    asks_to_leave(job, "failed")
    job.stops("host-1", "host-2")
    kinds = [incident.kind for incident in job.run.history.incidents]
    assert kinds == ["leader-lost", "allocation-broke"]


def test_another_agent_takes_over_from_a_leader_that_took_over() -> None:
    job = allocated()
    takes_over_on(job)
    agents_stopped(job, "host-1", "host-2")
    job.registers("host-0", pid=2)
    job.trains()
    (again,) = takes_over_on(job, "host-2")
    assert isinstance(again, ReplaceAgent)
    assert again.host == "host-1"
    (stop,) = job.registers("host-0", pid=2)
    assert isinstance(stop, StopAttempt)
    kinds = [one.kind for one in job.run.history.incidents]
    assert kinds == ["leader-lost", "leader-lost"]


def test_drained_hosts_stay_excluded_after_a_take_over() -> None:
    job = Job(hosts=2, spares=1).granted().running()
    drains(job, "host-2")
    takes_over_on(job)
    assert (list(job.run.hosts.exclude), job.run.hosts.shut) == (["host-2"], ("host-2",))


def test_only_a_leader_of_the_same_allocation_takes_over() -> None:
    job = allocated()
    assert takes_over(job.run, job.allocation, "")
    assert expected_back(job.run, "host-1") == ("host-2",)
    next_run = Job(hosts=3).granted(restarts=1).allocation
    assert not takes_over(job.run, next_run, "it was killed"), (
        "another allocation of the job has other agents"
    )
    replaces_hosts = Job().granted(successor_s=300.0).running()
    assert not takes_over(replaces_hosts.run, replaces_hosts.allocation, "it was killed"), (
        "its pods are created again"
    )
    assert not takes_over(Job().running().run, None, ""), "nothing says that it was an agent"
    assert takes_over(Job().running().run, None, "it was killed")


# The last step before the leader was lost


def test_the_incident_has_the_last_step_and_the_last_checkpoint() -> None:
    job = allocated()
    job.saves(5)
    at = job.at + 40
    job.at += 60
    takes_over_on(job, reached=Reached(attempt=1, step=9, at=at))
    (incident,) = job.run.history.incidents
    assert (incident.step, incident.saved, incident.at) == (9, 5, at)
    assert incident.detected_after_s == job.at - at


def test_a_checkpoint_unknown_to_the_old_leader_counts_when_ranks_resume_from_it() -> None:
    job = allocated()
    job.saves(5)
    takes_over_on(job, reached=Reached(attempt=1, step=11, at=job.at))
    agents_stopped(job, "host-1", "host-2")
    job.registers("host-0", pid=2)
    job.tell(TrainingResumed(at=job.now(), attempt=2, step=10))
    (incident,) = job.run.history.incidents
    assert (incident.step, incident.saved) == (11, 10)


def test_without_steps_the_leader_was_lost_when_it_was_last_heard() -> None:
    job = allocated()
    heard = job.at + 3000
    job.at += 3004
    takes_over_on(job, heard=heard)
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.at) == ("leader-lost", heard)
    assert incident.detected_after_s == job.at - heard


def test_metrics_of_an_earlier_attempt_are_ignored() -> None:
    job = allocated()
    job.fails_once()
    job.trains()
    takes_over_on(job, reached=Reached(attempt=1, step=9, at=job.at))
    assert job.run.history.incidents[-1].step == 1


def test_a_metric_from_the_future_gets_the_time_of_the_last_event() -> None:
    job = allocated()
    last = job.run.last_at
    takes_over_on(job, reached=Reached(attempt=1, step=9, at=job.at + 3600))
    (incident,) = job.run.history.incidents
    assert (incident.step, incident.at) == (9, last)

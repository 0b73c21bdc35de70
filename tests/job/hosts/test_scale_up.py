"""When a job that shrank to fewer hosts grows to more hosts again."""

from typing import Any

from orchestrator.contract.messages.actions import (
    Action,
    ReplaceAgent,
    Replan,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import HostUnavailable, Replanned
from orchestrator.job.hosts.scale_up import ASK_EVERY_S, EVERY_S
from orchestrator.job.stage import Stopping
from orchestrator.job.state import REPLACE_S
from tests.job.job_driver import Job, plan


def kinds(actions: tuple[Action, ...]) -> list[type]:
    return [type(action) for action in actions]


def loses_for_good(job: Job, name: str) -> tuple[Action, ...]:
    """A host is lost, and the scheduler says that it is unavailable."""
    job.loses(name)
    job.stops(*(host for host in job.run.attempt.placement if host != name))
    return job.tell(HostUnavailable(at=job.now(), host=name, why="it is down"))


def planner_answers(job: Job, hosts: int, number: int) -> tuple[Action, ...]:
    return job.tell(Replanned(at=job.now(), plan=plan(hosts), plan_number=number))


def shrunk_job(hosts: int = 3, **more: Any) -> Job:
    """A job in attempt 2, on one host fewer than planned."""
    job = Job(hosts=hosts, shrink=True, **more).running()
    job.saves(10)
    assert Replan in kinds(loses_for_good(job, f"host-{hosts - 1}"))
    assert kinds(planner_answers(job, hosts - 1, 2)) == [StartAttempt]
    job.trains(10)
    assert (job.run.current.number, len(job.run.attempt.placement)) == (2, hosts - 1)
    return job


def test_a_job_grows_after_a_checkpoint_if_its_host_is_back() -> None:
    job = shrunk_job()
    fruitless, restarts, incidents = (
        job.run.history.fruitless,
        job.run.history.restarts,
        len(job.run.history.incidents),
    )
    assert job.saves(20) == (), "no host is back"
    assert job.registers("host-2", pid=2) == (), "not before the next checkpoint"
    (stop,) = job.saves(30)
    assert isinstance(stop, StopAttempt)
    assert stop.reason == "growing from 2 to 3 hosts by plan 1: host-2 can be used again"
    assert job.run.job is not None
    assert stop.grace_s == job.run.job.stop_grace, "ranks have time to save"
    job.saves(31)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1", "host-2")
    assert start.reason == "attempt 3 on 3 hosts from checkpoint step-31"
    assert (job.run.current.number, job.run.plans.replanned, job.run.plans.larger) == (1, None, ())
    assert job.run.history.fruitless == min(fruitless, 0)
    assert (job.run.history.restarts, len(job.run.history.incidents)) == (restarts, incidents), (
        "growing is no failure"
    )
    job.trains(31)
    assert job.saves(40) == (), "the job has its full size"


def test_a_job_grows_at_most_once_per_interval() -> None:
    job = shrunk_job()
    job.registers("host-2", pid=2)
    job.saves(20)
    job.stops()
    job.trains(20)
    loses_for_good(job, "host-1")
    assert kinds(planner_answers(job, 2, 3)) == [StartAttempt]
    job.trains(20)
    job.registers("host-1", pid=3)
    assert job.saves(30) == (), "the job grew a moment ago"
    job.at += EVERY_S
    assert kinds(job.saves(40)) == [StopAttempt]


def test_a_host_lost_again_while_the_job_stops_cancels_the_growth() -> None:
    job = shrunk_job()
    job.registers("host-2", pid=2)
    job.saves(20)
    job.loses("host-2")
    (start,) = [a for a in job.stops() if isinstance(a, StartAttempt)]
    assert start.hosts == ("host-0", "host-1")
    assert (job.run.current.number, len(job.run.plans.larger)) == (2, 1)


def test_a_job_grows_to_the_largest_plan_that_its_hosts_allow() -> None:
    job = shrunk_job(hosts=4)
    loses_for_good(job, "host-2")
    planner_answers(job, 2, 3)
    job.trains(10)
    assert [p.number for p in job.run.plans.larger] == [1, 2]
    job.registers("host-3", pid=2)
    job.saves(20)
    job.stops()
    assert (job.run.current.number, [p.number for p in job.run.plans.larger]) == (2, [1])
    job.trains(20)
    job.registers("host-2", pid=2)
    job.at += EVERY_S
    job.saves(30)
    job.stops()
    assert (job.run.current.number, job.run.plans.larger) == (1, ())


def test_a_restart_for_another_reason_uses_the_hosts_that_are_back() -> None:
    job = shrunk_job()
    job.registers("host-2", pid=2)
    job.exits(0)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert len(start.hosts) == 3


def test_excluded_hosts_do_not_count() -> None:
    job = shrunk_job()
    job.registers("host-2", pid=2, devices=1)
    assert job.saves(20) == ()


def test_agents_are_requested_on_missing_hosts_from_time_to_time() -> None:
    job = shrunk_job()
    assert job.waits(REPLACE_S) == ()
    (order,) = job.waits(ASK_EVERY_S)
    assert isinstance(order, ReplaceAgent)
    assert (order.host, order.elsewhere) == ("host-2", False)
    assert order.reason == "the job runs on 2 of 3 hosts: is host-2 there again?"
    assert job.tell(HostUnavailable(at=job.now(), host="host-2", why="still down")) == ()
    assert job.waits(60) == ()
    assert kinds(job.waits(ASK_EVERY_S)) == [ReplaceAgent]
    job.registers("host-2", pid=2)
    assert job.waits(ASK_EVERY_S) == (), "host-2 is back"


def test_no_agent_is_requested_if_the_scheduler_replaces_hosts() -> None:
    job = Job(hosts=3, shrink=True).granted(successor_s=5.0).running()
    job.loses("host-2")
    job.stops("host-0", "host-1")
    job.waits(60)
    assert kinds(planner_answers(job, 2, 2)) == [StartAttempt]
    job.trains()
    assert job.waits(2 * ASK_EVERY_S) == ()
    job.registers("host-9", pid=2)
    assert kinds(job.saves(5)) == [StopAttempt]
    assert isinstance(job.run.stage, Stopping)


def test_a_job_grows_with_a_successor_that_comes_late() -> None:
    job = Job(hosts=2, shrink=True).granted(successor_s=300.0).running()
    job.loses("host-1")
    job.stops("host-0")
    assert kinds(job.waits(310)) == [Replan]
    assert kinds(planner_answers(job, 1, 2)) == [StartAttempt]
    job.trains(10)
    assert job.waits(ASK_EVERY_S + 1) == (), "the scheduler looks for a host by itself"
    assert job.registers("host-7") == ()
    (stop,) = job.saves(20)
    assert isinstance(stop, StopAttempt)
    assert stop.reason == "growing from 1 to 2 hosts by plan 1: host-7 can be used again"
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-7")


def test_a_failure_while_the_job_stops_to_grow_is_an_incident() -> None:
    job = shrunk_job()
    job.registers("host-2", pid=2)
    job.saves(20)
    job.raises(0, "CUDA error: uncorrectable ECC error encountered")
    job.stops()
    assert [(one.failure, one.culprit.host) for one in job.run.history.incidents[1:]] == [
        ("uncorrectable-ecc", "host-0")
    ]
    assert sorted(job.run.attempt.placement) == ["host-1", "host-2"]

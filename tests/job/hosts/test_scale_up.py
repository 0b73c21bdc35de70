"""A job that went on with fewer hosts: when it goes back to more."""

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
from tests.job.supervise_stage import Job, plan


def kinds(actions: tuple[Action, ...]) -> list[type]:
    return [type(action) for action in actions]


def gone(job: Job, name: str) -> tuple[Action, ...]:
    """A host breaks, and no agent can be had there."""
    job.loses(name)
    job.stops(*(host for host in job.run.attempt.placement if host != name))
    return job.tell(HostUnavailable(at=job.now(), host=name, why="it is down"))


def planned(job: Job, hosts: int, number: int) -> tuple[Action, ...]:
    return job.tell(Replanned(at=job.now(), plan=plan(hosts), plan_number=number))


def shrunk(hosts: int = 3, **more: Any) -> Job:
    """On one host fewer, and in its attempt 2."""
    job = Job(hosts=hosts, shrink=True, **more).running()
    job.saves(10)
    assert Replan in kinds(gone(job, f"host-{hosts - 1}"))
    assert kinds(planned(job, hosts - 1, 2)) == [StartAttempt]
    job.trains(10)
    assert (job.run.current.number, len(job.run.attempt.placement)) == (2, hosts - 1)
    return job


def test_it_grows_right_after_a_checkpoint_once_the_host_is_back() -> None:
    job = shrunk()
    fruitless, restarts, incidents = (
        job.run.history.fruitless,
        job.run.history.restarts,
        len(job.run.history.incidents),
    )
    assert job.saves(20) == (), "nobody is back"
    assert job.registers("host-2", pid=2) == (), "not in the middle of the work"
    (stop,) = job.saves(30)
    assert isinstance(stop, StopAttempt)
    assert stop.reason == "growing from 2 to 3 hosts by plan 1: host-2 can be used again"
    assert job.run.job is not None
    assert stop.grace_s == job.run.job.stop_grace, "there is time for a checkpoint"
    job.saves(31)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1", "host-2")
    assert start.reason == "attempt 3 on 3 hosts from checkpoint step-31"
    assert (job.run.current.number, job.run.plans.replanned, job.run.plans.larger) == (1, None, ())
    assert job.run.history.fruitless == min(fruitless, 0)
    assert (job.run.history.restarts, len(job.run.history.incidents)) == (restarts, incidents), (
        "there is no culprit"
    )
    job.trains(31)
    assert job.saves(40) == (), "it has all it asked for"


def test_hosts_that_come_and_go_do_not_stop_it_all_the_time() -> None:
    job = shrunk()
    job.registers("host-2", pid=2)
    job.saves(20)
    job.stops()
    job.trains(20)
    gone(job, "host-1")
    assert kinds(planned(job, 2, 3)) == [StartAttempt]
    job.trains(20)
    job.registers("host-1", pid=3)
    assert job.saves(30) == (), "it has just grown"
    job.at += EVERY_S
    assert kinds(job.saves(40)) == [StopAttempt]


def test_hosts_that_go_again_while_it_stops_leave_it_as_it_was() -> None:
    job = shrunk()
    job.registers("host-2", pid=2)
    job.saves(20)
    job.loses("host-2")
    (start,) = [a for a in job.stops() if isinstance(a, StartAttempt)]
    assert start.hosts == ("host-0", "host-1")
    assert (job.run.current.number, len(job.run.plans.larger)) == (2, 1)


def test_it_goes_back_to_the_largest_plan_within_reach() -> None:
    job = shrunk(hosts=4)
    gone(job, "host-2")
    planned(job, 2, 3)
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


def test_a_restart_for_another_reason_takes_the_hosts_that_are_back() -> None:
    job = shrunk()
    job.registers("host-2", pid=2)
    job.exits(0)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert len(start.hosts) == 3


def test_hosts_that_are_left_out_do_not_count() -> None:
    job = shrunk()
    job.registers("host-2", pid=2, devices=1)
    assert job.saves(20) == ()


def test_agents_are_asked_for_on_missing_hosts_now_and_then() -> None:
    job = shrunk()
    assert job.waits(REPLACE_S) == ()
    (ask,) = job.waits(ASK_EVERY_S)
    assert isinstance(ask, ReplaceAgent)
    assert (ask.host, ask.elsewhere) == ("host-2", False)
    assert ask.reason == "the job runs on 2 of 3 hosts: is host-2 there again?"
    assert job.tell(HostUnavailable(at=job.now(), host="host-2", why="still down")) == ()
    assert job.waits(60) == ()
    assert kinds(job.waits(ASK_EVERY_S)) == [ReplaceAgent]
    job.registers("host-2", pid=2)
    assert job.waits(ASK_EVERY_S) == (), "it is there"


def test_where_the_scheduler_replaces_hosts_nobody_is_asked() -> None:
    job = Job(hosts=3, shrink=True).granted(successor_s=5.0).running()
    job.loses("host-2")
    job.stops("host-0", "host-1")
    job.waits(60)
    assert kinds(planned(job, 2, 2)) == [StartAttempt]
    job.trains()
    assert job.waits(2 * ASK_EVERY_S) == ()
    job.registers("host-9", pid=2)
    assert kinds(job.saves(5)) == [StopAttempt]
    assert isinstance(job.run.stage, Stopping)


def test_where_hosts_have_successors_it_grows_with_whoever_comes_late() -> None:
    job = Job(hosts=2, shrink=True).granted(successor_s=300.0).running()
    job.loses("host-1")
    job.stops("host-0")
    assert kinds(job.waits(310)) == [Replan]
    assert kinds(planned(job, 1, 2)) == [StartAttempt]
    job.trains(10)
    assert job.waits(ASK_EVERY_S + 1) == (), "the scheduler looks for one without being asked"
    assert job.registers("host-7") == ()
    (stop,) = job.saves(20)
    assert isinstance(stop, StopAttempt)
    assert stop.reason == "growing from 1 to 2 hosts by plan 1: host-7 can be used again"
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-7")


def test_what_breaks_while_it_stops_to_grow_is_an_incident() -> None:
    job = shrunk()
    job.registers("host-2", pid=2)
    job.saves(20)
    job.raises(0, "CUDA error: uncorrectable ECC error encountered")
    job.stops()
    assert [(one.failure, one.culprit.host) for one in job.run.history.incidents[1:]] == [
        ("uncorrectable-ecc", "host-0")
    ]
    assert sorted(job.run.attempt.placement) == ["host-1", "host-2"]

"""What a job does if a host is drained, for each value of `cluster.slurm.on_drain`."""

from typing import Literal

import pytest
from msgspec.structs import replace

from orchestrator.contract.messages.actions import Action, Requeue, StartAttempt, StopAttempt
from orchestrator.contract.messages.events import HostFlagged, HostOpened
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.job.hosts.scheduler_notices import asked_about, heard, news
from orchestrator.job.stage import Running
from orchestrator.seams import HostNotice
from tests.job.job_driver import Job, submitted

Policy = Literal["auto", "finish", "checkpoint_and_requeue", "at_next_checkpoint"]
DRAINED = HostNotice("host-1", "ALLOCATED+DRAIN", "a fan", lets_finish=True)
MAINTENANCE = HostNotice("host-1", "MAINTENANCE", "reservation maint_1")


def a_job(policy: Policy, spares: int = 0) -> Job:
    launch = submitted(spares=spares).launch
    slurm = replace(launch, slurm=SlurmSpec(on_drain=policy))
    return Job(spares=spares, launch=slurm, backend="slurm").granted()


def notice_arrives(job: Job, notice: HostNotice = DRAINED) -> tuple[Action, ...]:
    """The leader reads `notice` from the scheduler; the job gets an event if it is new."""
    actions: tuple[Action, ...] = ()
    for event in news(job.run, asked_about(job.run), (), (notice,), job.now()):
        assert isinstance(event, HostFlagged)
        actions += job.tell(event)
    return actions


def test_by_default_a_spare_replaces_a_drained_host_after_the_next_step() -> None:
    assert SlurmSpec().on_drain == "auto"
    job = a_job("auto", spares=1).running()
    (stop,) = notice_arrives(job)
    assert isinstance(stop, StopAttempt)
    job.saves(7)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert (job.run.history.incidents, job.run.history.restarts) == ((), 0)


def test_by_default_the_drained_host_of_the_leader_is_used_in_spite_of_spares() -> None:
    job = a_job("auto", spares=1).running()
    assert notice_arrives(job, replace(DRAINED, host="host-0")) == ()
    assert (type(job.run.stage), job.run.hosts.exclude) == (Running, {})


@pytest.mark.parametrize("policy", ["auto", "finish"])
def test_without_a_spare_a_drained_host_is_used_until_the_job_ends(policy: Policy) -> None:
    job = a_job(policy).running()
    assert notice_arrives(job) == ()
    assert (type(job.run.stage), job.run.hosts.exclude) == (Running, {})
    assert job.run.hosts.draining == {"host-1": "host-1 is ALLOCATED+DRAIN: a fan"}
    assert news(job.run, asked_about(job.run), heard((DRAINED,)), (DRAINED,), 9.0) == ()
    job.saves(5)
    assert isinstance(job.run.stage, Running)
    (start,) = job.fails_once()
    assert isinstance(start, StartAttempt)
    assert start.hosts == job.hosts, "the host is still in the allocation, so a restart uses it"


def test_a_drained_spare_is_excluded_but_a_drained_host_that_is_needed_is_used() -> None:
    job = a_job("finish", spares=1).running()
    notice_arrives(job, replace(DRAINED, host="host-2"))
    assert list(job.run.hosts.exclude) == ["host-2"]
    job = a_job("finish")
    job.leads()
    job.registers("host-0")
    assert notice_arrives(job) == ()
    (start,) = job.registers("host-1")
    assert isinstance(start, StartAttempt)


@pytest.mark.parametrize("policy", ["finish", "at_next_checkpoint"])
def test_the_job_leaves_at_once_when_maintenance_begins(policy: Policy) -> None:
    job = a_job(policy).running()
    assert notice_arrives(job) == ()
    (stop,) = notice_arrives(job, MAINTENANCE)
    assert isinstance(stop, StopAttempt)
    assert job.run.hosts.draining == {}
    job.saves(7)
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    assert (job.run.history.incidents, job.run.history.restarts) == ((), 0)


@pytest.mark.parametrize("spares", [0, 1])
def test_checkpoint_and_requeue_stops_the_attempt_at_once(spares: int) -> None:
    job = a_job("checkpoint_and_requeue", spares).running()
    (stop,) = notice_arrives(job)
    assert isinstance(stop, StopAttempt)
    job.saves(7)
    (next_action,) = job.stops()
    assert isinstance(next_action, StartAttempt if spares else Requeue)


def test_at_next_checkpoint_waits_for_the_checkpoint() -> None:
    job = a_job("at_next_checkpoint").running()
    assert notice_arrives(job) == ()
    assert isinstance(job.run.stage, Running)
    assert notice_arrives(job) == (), "the drain is known already"
    (stop,) = job.saves(10)
    assert isinstance(stop, StopAttempt)
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-1",)
    assert "ALLOCATED+DRAIN: a fan" in requeue.reason


def test_a_host_that_is_resumed_before_the_checkpoint_stays() -> None:
    for policy in ("finish", "at_next_checkpoint"):
        job = a_job(policy).running()
        notice_arrives(job)
        (opened,) = news(job.run, asked_about(job.run), (), (), job.now())
        assert isinstance(opened, HostOpened)
        assert job.tell(opened) == ()
        assert (job.run.hosts.draining, job.run.hosts.exclude, job.run.hosts.shut) == ({}, {}, ())
        assert job.saves(10) == ()


def test_a_drained_host_that_is_down_stops_the_attempt_at_once() -> None:
    job = a_job("finish").running()
    (stop,) = notice_arrives(job, HostNotice("host-1", "DOWN+DRAIN", "a fan"))
    assert isinstance(stop, StopAttempt)

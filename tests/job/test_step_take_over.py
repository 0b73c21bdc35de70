"""An agent takes over within the allocation from a leader that is gone."""

from typing import Any

from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.messages.actions import (
    Action,
    ReplaceAgent,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import HostUnavailable, LeaderStarted, TrainingResumed
from orchestrator.job.leader_change import expected_back, takes_over
from orchestrator.job.stage import Waiting
from tests.job.supervise_stage import Job

HOW = "its process on host-0 had ended, and host-0 is well"


def allocated(**more: Any) -> Job:
    """Three hosts are trained on, or two and a spare; the leader is on host-0."""
    return Job(**{"hosts": 3, **more}).granted().running()


def takes(job: Job, name: str = "host-1", **more: Any) -> tuple[Action, ...]:
    """The agent of `name` leads the same allocation from now on."""
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


def follows(job: Job, *names: str) -> tuple[Action, ...]:
    """Agents that were there come to the new leader, and say that no rank is left."""
    actions: tuple[Action, ...] = ()
    for name in names:
        (stop,) = job.registers(name)
        assert isinstance(stop, StopAttempt)
        actions = job.stops(name)
    return actions


def unavailable(job: Job, name: str) -> tuple[Action, ...]:
    return job.tell(HostUnavailable(at=job.now(), host=name, why="Slurm says that it is DOWN"))


def test_the_job_goes_on_within_its_allocation_on_all_of_its_hosts() -> None:
    job = allocated()
    job.saves(5)
    (replaced,) = takes(job)
    assert isinstance(replaced, ReplaceAgent)
    assert replaced.host == "host-0"
    assert follows(job, "host-1", "host-2") == ()
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


def test_hosts_that_were_tried_together_are_not_tried_again() -> None:
    job = Job(hosts=2, preflight=True).granted().starts()
    job.run = _checked(job)
    takes(job)
    follows(job, "host-1")
    assert isinstance(job.registers("host-0", pid=2)[-1], StartAttempt)


def _checked(job: Job) -> Any:
    from orchestrator.contract.messages.events import HostsChecked

    job.tell(HostsChecked(at=job.now(), check=job.run.hosts.checks, unfit={}))
    job.trains()
    return job.run


def test_no_rank_starts_before_the_followers_have_none_of_the_former_attempt() -> None:
    job = allocated()
    takes(job)
    job.registers("host-0", pid=2)
    job.registers("host-1")
    job.registers("host-2")
    job.stops("host-1")
    assert isinstance(job.run.stage, Waiting)
    assert isinstance(job.stops("host-2")[-1], StartAttempt)


def test_a_spare_takes_the_place_of_a_leaders_host_that_is_lost() -> None:
    job = Job(hosts=2, spares=1).granted().running()
    takes(job)
    unavailable(job, "host-0")
    follows(job, "host-1")
    (start,) = job.registers("host-2")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-2", "host-1")


def test_without_a_spare_the_job_goes_back_to_the_queue_without_that_host_alone() -> None:
    """Whether the other agents have come to the new leader yet or not."""
    for came in (("host-1", "host-2"), ("host-1",), ()):
        job = allocated()
        takes(job)
        follows(job, *came)
        (requeue,) = unavailable(job, "host-0")
        assert isinstance(requeue, Requeue)
        assert requeue.exclude == ("host-0",)


def test_a_follower_that_is_lost_as_well_has_an_agent_started_again() -> None:
    job = allocated()
    takes(job)
    follows(job, "host-1")
    job.registers("host-0", pid=2)
    (again,) = job.loses("host-2")
    assert isinstance(again, ReplaceAgent)
    job.waits(4)
    job.registers("host-2", pid=2)
    assert [one.kind for one in job.run.history.incidents] == ["leader-lost", "host-lost"]


def test_a_leader_that_took_over_is_taken_over_from_in_turn() -> None:
    job = allocated()
    takes(job)
    follows(job, "host-1", "host-2")
    job.registers("host-0", pid=2)
    job.trains()
    (again,) = takes(job, "host-2")
    assert isinstance(again, ReplaceAgent)
    assert again.host == "host-1"
    (stop,) = job.registers("host-0", pid=2)
    assert isinstance(stop, StopAttempt)
    culprits = [one.culprit.host for one in job.run.history.incidents]
    assert culprits == ["host-0", "host-1"]


def test_hosts_that_an_administrator_wants_back_stay_left_out() -> None:
    from tests.job.test_step_scheduler import flag

    job = Job(hosts=2, spares=1).granted().running()
    flag(job, "host-2")
    takes(job)
    assert (list(job.run.hosts.exclude), job.run.hosts.shut) == (["host-2"], ("host-2",))


def test_who_is_expected_back_and_where() -> None:
    job = allocated()
    assert takes_over(job.run, job.allocation)
    assert expected_back(job.run, "host-1") == ("host-2",)
    next_run = Job(hosts=3).granted(restarts=1).allocation
    assert not takes_over(job.run, next_run), "another run of the job has other agents"
    moving = Job().granted(successor_s=300.0).running()
    assert not takes_over(moving.run, moving.allocation), "its pods are created again"
    assert not takes_over(Job().running().run, None)


# How far it had come


def test_the_incident_has_the_last_step_that_was_done_and_what_is_done_again() -> None:
    job = allocated()
    job.saves(5)
    at = job.at + 40
    job.at += 60
    takes(job, reached=Reached(attempt=1, step=9, at=at))
    (incident,) = job.run.history.incidents
    assert (incident.step, incident.saved, incident.at) == (9, 5, at)
    assert incident.detected_after_s == job.at - at


def test_a_checkpoint_that_the_former_leader_did_not_hear_of_counts_once_it_is_gone_on_from() -> (
    None
):
    job = allocated()
    job.saves(5)
    takes(job, reached=Reached(attempt=1, step=11, at=job.at))
    follows(job, "host-1", "host-2")
    job.registers("host-0", pid=2)
    job.tell(TrainingResumed(at=job.now(), attempt=2, step=10))
    (incident,) = job.run.history.incidents
    assert (incident.step, incident.saved) == (11, 10)


def test_metrics_of_an_earlier_attempt_say_nothing_of_this_one() -> None:
    job = allocated()
    job.fails_once()
    job.trains()
    takes(job, reached=Reached(attempt=1, step=9, at=job.at))
    assert job.run.history.incidents[-1].step == 1


def test_a_clock_that_is_ahead_puts_nothing_into_the_future() -> None:
    job = allocated()
    last = job.run.last_at
    takes(job, reached=Reached(attempt=1, step=9, at=job.at + 3600))
    (incident,) = job.run.history.incidents
    assert (incident.step, incident.at) == (9, last)

"""A scheduler grants, drains and takes away hosts, and ends or requeues the job's allocation."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from orchestrator.contract.check_results import BEFORE_HOOK, Finding
from orchestrator.contract.launch import Breakdown, Cause
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.actions import (
    Action,
    CheckHosts,
    EndJob,
    ReplaceAgent,
    Replan,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import (
    HostFlagged,
    HostLeaving,
    HostsChecked,
    HostUnavailable,
    LeaveAsked,
    Replanned,
    ReplanRefused,
    RequeueRefused,
)
from orchestrator.contract.plan import Traffic
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.failures.policy import strike_weight
from orchestrator.job.stage import Checking, Queued, Waiting
from orchestrator.job.transitions import step
from tests.job.job_driver import START, Job, plan, submitted

T = TypeVar("T")
CANCELLED = "cancelled by somebody, in the scheduler (SIGUSR2)"


def only(actions: Sequence[Action], kind: type[T]) -> T:
    """The only action, which must be of this kind."""
    (action,) = actions
    assert isinstance(action, kind)
    return action


def scheduled_job(**more: Any) -> Job:
    return Job(**more).granted()


def asks_to_leave(job: Job, cause: Cause | None) -> tuple[Action, ...]:
    return job.tell(LeaveAsked(at=job.now(), cause=cause, words="SIGUSR2"))


def drains(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostFlagged(at=job.now(), host=host, state="DRAINING", reason="bad fan"))


# The scheduler asks the job to leave its allocation


def test_a_second_request_to_leave_without_a_cause_changes_nothing() -> None:
    job = scheduled_job().running()
    asks_to_leave(job, None)
    asks_to_leave(job, "preempted")
    assert asks_to_leave(job, None) == ()
    only(job.stops(), Requeue)


def test_a_later_answer_of_the_scheduler_says_why_the_job_leaves() -> None:
    """Slurm sends SIGTERM before it shows that it requeues the job, and again afterwards."""
    job = scheduled_job().running()
    for cause in (None, "unknown", None, "requeued", "unknown"):
        asks_to_leave(job, cause)
    requeue = only(job.stops(), Requeue)
    assert requeue.reason == "requeued by an administrator or the scheduler (SIGUSR2)"


def test_a_plan_for_fewer_hosts_is_not_used_if_the_host_is_back() -> None:
    job = Job(shrink=True).running()
    job.loses("host-1")
    job.stops("host-0")
    order = only(job.waits(700), Replan)
    assert order.hosts == 1
    only(job.registers("host-1", pid=2), StartAttempt)
    smaller = Replanned(at=job.now(), plan=plan(1), plan_number=2)
    assert job.tell(smaller) == ()
    assert (len(job.run.plan.hosts), job.run.current.number) == (2, 1)


def test_nothing_starts_after_a_request_to_leave() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    assert asks_to_leave(job, None) == ()
    assert job.registers("host-1") == (), "the cause is not known yet"
    assert job.waits(60) == ()
    assert (type(job.run.stage), job.run.attempt.number) == (Waiting, 0)
    only(asks_to_leave(job, "preempted"), Requeue)


@pytest.mark.parametrize("cause", ["preempted", "time-limit", "requeued", "unknown"])
def test_a_job_that_is_asked_to_leave_saves_and_is_queued_again(cause: Cause) -> None:
    job = scheduled_job().running()
    stop = only(asks_to_leave(job, None), StopAttempt)
    assert stop.grace_s == 30.0, "time for a checkpoint"
    assert asks_to_leave(job, cause) == ()
    job.exits(0, exit_code=210, stopped=False)  # Slurm's signal reached it before the agent's
    job.saves(7)
    requeue = only(job.stops(), Requeue)
    assert requeue.exclude == ()
    assert (type(job.run.stage), job.run.state) == (Queued, "PENDING")
    assert (job.run.history.incidents, job.run.history.restarts, job.run.history.fruitless) == (
        (),
        0,
        0,
    )


def test_an_allocation_that_failed_is_an_incident_without_culprit_and_the_job_is_queued_again() -> (
    None
):
    """The batch script was killed, so Slurm ends the allocation without a request."""
    job = scheduled_job().running()
    only(asks_to_leave(job, None), StopAttempt)
    words = "Slurm job 7 is COMPLETING (JobLaunchFailure)"
    request = LeaveAsked(at=job.now(), cause="failed", words=words)
    assert job.tell(request) == ()
    job.exits(1, signal=15)
    job.saves(7)
    requeue = only(job.stops(), Requeue)
    assert requeue.exclude == ()
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit) == ("allocation-broke", NOBODY)
    assert words in incident.cause
    assert (incident.rule, incident.remedy) == ("broken-allocation", "restart")
    assert (incident.step, incident.saved) == (1, 7), "no step is lost"
    assert job.run.history.fruitless == 0
    job.granted(restarts=1).starts().trains(first=7)
    (incident,) = job.run.history.incidents
    assert incident.recovered_after_s is not None


def test_an_allocation_that_failed_before_ranks_started_is_queued_again_at_once() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    only(asks_to_leave(job, "failed"), Requeue)
    assert [incident.kind for incident in job.run.history.incidents] == ["allocation-broke"]


def test_a_rank_that_failed_before_the_batch_script_is_the_cause() -> None:
    job = scheduled_job().running()
    job.exits(1, signal=9)
    asks_to_leave(job, "failed")
    only(job.stops(), Requeue)
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit.rank) == ("rank-killed", 1)


def test_if_srun_was_killed_the_host_of_the_previous_leader_is_no_culprit() -> None:
    job = scheduled_job().running()
    killed = Breakdown(what="SIGKILL ended srun on host-0, and with it all agents", at=job.now())
    assert job.allocation is not None
    job.granted(restarts=1)
    job.allocation = replace(job.allocation, restarts=1, broke_before=killed)
    job.starts().trains()
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit) == ("allocation-broke", NOBODY)
    assert (incident.cause, incident.at) == (killed.what, killed.at)
    assert incident.recovered_after_s is not None
    assert (job.run.history.restarts, job.run.history.fruitless) == (1, 1), "it spends the budget"


@pytest.mark.parametrize(
    ("notice_s", "stop_grace", "ends_in_s", "grace_s"),
    [
        (600.0, 30.0, 601.0, 555.0),  # all but the time for a requeue request
        (600.0, 30.0, 660.0, 555.0),
        (600.0, 30.0, None, 555.0),
        (90.0, 120.0, 91.0, 46.0),  # not beyond the end: the job would be lost
        (90.0, 120.0, 150.0, 105.0),
        (90.0, 120.0, 7200.0, 120.0),  # a preemption, or a signal sent by hand
        (90.0, 120.0, -60.0, 45.0),  # the end was postponed after the leader started
        (90.0, 120.0, None, 120.0),
        (30.0, 30.0, 31.0, 10.0),
        (None, 30.0, 31.0, 30.0),  # this scheduler gives no notice
    ],
)
def test_a_checkpoint_may_use_the_whole_notice_but_no_more(
    notice_s: float | None, stop_grace: float, ends_in_s: float | None, grace_s: float
) -> None:
    job = scheduled_job(stop_grace=stop_grace)
    assert job.allocation is not None
    ends_at = None if ends_in_s is None else START + 1000.0 + ends_in_s
    job.allocation = replace(job.allocation, notice_s=notice_s, ends_at=ends_at)
    job.running()
    for request in (
        LeaveAsked(at=START + 1000.0, cause=None, words="SIGUSR2"),
        HostFlagged(at=START + 1000.0, host="host-1", state="DRAINING", reason="bad fan"),
        HostLeaving(at=START + 1000.0, host="host-1", why="SIGTERM"),
    ):
        _, (stop,) = step(job.run, request)
        assert isinstance(stop, StopAttempt)
        assert stop.grace_s == grace_s


def test_the_next_allocation_resumes_from_the_checkpoint() -> None:
    job = scheduled_job().running()
    job.saves(7)
    asks_to_leave(job, "preempted")
    job.stops()
    job.granted(restarts=1)
    job.starts()
    assert job.run.attempt.number == 2
    assert "from checkpoint step-7" in job.run.stage.reason
    assert job.run.history.incidents == ()


def test_a_job_cancelled_in_the_scheduler_ends() -> None:
    job = scheduled_job().running()
    asks_to_leave(job, None)
    asks_to_leave(job, "cancelled")
    end = only(job.stops(), EndJob)
    assert end == EndJob(
        state="CANCELLED", reason="cancelled by somebody, in the scheduler (SIGUSR2)"
    )


def test_a_job_is_not_queued_again_before_the_cause_is_known() -> None:
    job = scheduled_job().running()
    asks_to_leave(job, None)
    assert job.stops() == ()
    end = only(asks_to_leave(job, "cancelled"), EndJob)
    assert end == EndJob(
        state="CANCELLED", reason="cancelled by somebody, in the scheduler (SIGUSR2)"
    )


def test_a_job_is_queued_again_if_the_scheduler_never_reports_the_cause() -> None:
    job = scheduled_job().running()
    asks_to_leave(job, None)
    job.stops()
    only(job.waits(100), Requeue)


def test_ranks_that_finish_after_a_request_to_leave_end_the_job() -> None:
    job = scheduled_job().running()
    asks_to_leave(job, "time-limit")
    end = only(job.stops(finished=True), EndJob)
    assert end.state == "SUCCEEDED"


def test_a_job_without_an_attempt_is_queued_again_at_once() -> None:
    job = scheduled_job()
    job.leads()
    assert asks_to_leave(job, None) == ()
    only(asks_to_leave(job, "preempted"), Requeue)


def test_a_failure_before_the_request_to_leave_is_an_incident() -> None:
    job = scheduled_job().running()
    job.exits(1)
    asks_to_leave(job, "preempted")
    only(job.stops(), Requeue)
    (incident,) = job.run.history.incidents
    assert (incident.kind, job.run.history.restarts) == ("rank-killed", 1)


def test_agents_lost_while_the_job_leaves_are_no_culprits() -> None:
    job = scheduled_job().running()
    asks_to_leave(job, "requeued")
    assert job.loses("host-0") == ()
    assert only(job.stops("host-1"), Requeue).exclude == ()
    assert job.run.history.incidents == ()


# A leader that is lost with its host


def test_the_host_of_a_lost_leader_is_the_culprit() -> None:
    job = scheduled_job(spares=1).running()
    job.granted(restarts=1)
    job.leads()
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("leader-lost", "host-0")


# Hosts that are drained


def test_a_spare_replaces_a_drained_host_at_a_checkpoint() -> None:
    job = scheduled_job(spares=1).running()
    stop = only(drains(job, "host-1"), StopAttempt)
    assert (stop.grace_s, stop.reason) == (30.0, "host-1 is DRAINING: bad fan")
    job.exits(2, exit_code=210)
    start = only(job.stops(), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert job.run.history.incidents == ()


def test_without_a_spare_a_drained_host_requeues_the_job() -> None:
    job = scheduled_job().running()
    drains(job, "host-1")
    requeue = only(job.stops(), Requeue)
    assert requeue.exclude == ("host-1",)


def test_draining_the_host_of_the_leader_requeues_the_job() -> None:
    job = scheduled_job(spares=1).running()
    drains(job, "host-0")
    assert only(job.stops(), Requeue).exclude == ("host-0",)


@pytest.mark.parametrize("told_first", ["the leader", "the scheduler"])
def test_a_host_that_is_down_is_an_incident_whoever_notices_it_first(told_first: str) -> None:
    job = scheduled_job(spares=1).running()
    job.saves(5)
    down = HostFlagged(at=job.now(), host="host-1", state="DOWN", reason="", down=True)
    if told_first == "the scheduler":
        job.tell(down)
    job.loses("host-1")
    if told_first == "the leader":
        job.tell(down)
    start = only(job.stops("host-0"), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("host-lost", "host-1")
    assert job.run.history.restarts == 1


def test_a_host_that_is_down_and_saved_its_checkpoint_is_no_incident() -> None:
    job = scheduled_job(spares=1).running()
    job.tell(HostFlagged(at=job.now(), host="host-1", state="DOWN", reason="", down=True))
    job.saves(5)
    job.stops("host-1")
    assert job.loses("host-1") == ()
    only(job.stops("host-0"), StartAttempt)
    assert (job.run.history.incidents, job.run.history.restarts) == ((), 0)


def test_a_drained_spare_is_excluded_and_training_continues() -> None:
    job = scheduled_job(spares=1).running()
    assert drains(job, "host-2") == ()
    assert drains(job, "host-2") == ()
    job.loses("host-1")
    requeue = only([*job.stops("host-0"), *job.waits(30)][-1:], Requeue)
    assert "host-2" in requeue.exclude


# Too few hosts


def loses_host_1(job: Job) -> tuple[Action, ...]:
    """One of two hosts is lost, and the scheduler says that it is unavailable."""
    job.running()
    job.saves(5)
    job.loses("host-1")
    job.stops("host-0")
    return job.tell(HostUnavailable(at=job.now(), host="host-1", why="Slurm says DOWN"))


def test_without_spare_and_shrink_a_job_is_queued_again_without_the_lost_host() -> None:
    job = scheduled_job()
    requeue = only(loses_host_1(job), Requeue)
    assert requeue == Requeue(
        exclude=("host-1",),
        reason="1 of 2 hosts are left, and no spare; resilience.shrink does not allow fewer hosts",
    )


def test_a_host_whose_agent_never_registered_is_excluded_from_the_requeue() -> None:
    """Each further allocation with this host would wait for `init_timeout` and fail."""
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    assert only(job.waits(600.0), Requeue).exclude == ("host-1",)


@pytest.mark.parametrize(
    ("registered", "excluded"),
    [(7, ("host-7",)), (4, ("host-4", "host-5", "host-6", "host-7")), (2, ())],
)
def test_if_most_agents_do_not_register_their_hosts_are_not_excluded(
    registered: int, excluded: tuple[str, ...]
) -> None:
    """A slow file server or the network of the leader is the more likely cause."""
    job = scheduled_job(hosts=8)
    job.leads()
    for number in range(registered):
        job.registers(f"host-{number}")
    requeue = only(job.waits(600.0), Requeue)
    assert requeue.exclude == excluded
    too_many = (
        f"; {8 - registered} of 8 never had an agent within 600 s: too many to exclude their hosts"
    )
    assert (too_many in requeue.reason) == (not excluded)


def test_a_requeue_that_is_refused_for_good_ends_the_job() -> None:
    job = scheduled_job().running()
    assert job.tell(RequeueRefused(at=job.now(), why="disabled")) == (), (
        "the job did not ask for a requeue"
    )
    asks_to_leave(job, "time-limit")
    job.stops()
    end = only(job.tell(RequeueRefused(at=job.now(), why="disabled")), EndJob)
    assert end.state == "FAILED"
    assert end.reason == (
        "the time limit of the allocation is near (SIGUSR2); it could not be queued again:"
        " disabled; resume with `ndctl submit SPEC --resume`"
    )


def test_a_requeue_that_is_refused_because_the_job_was_cancelled_is_no_failure() -> None:
    job = scheduled_job().running()
    asks_to_leave(job, "time-limit")
    job.stops()
    refused = RequeueRefused(at=job.now(), why="Slurm job 7 has ended", cancelled=True)
    assert only(job.tell(refused), EndJob).state == "CANCELLED"
    assert job.run.state == "CANCELLED"


@pytest.mark.parametrize("lost", [True, False])
def test_an_excluded_host_that_the_scheduler_grants_again_is_used(lost: bool) -> None:
    """The scheduler trusts the host again, and there may be no other host."""
    job = scheduled_job()
    if lost:
        loses_host_1(job)
    else:
        drains(job.running(), "host-1")
        job.stops()
    job.granted(restarts=1).running()
    assert (job.run.hosts.exclude, job.run.attempt.placement) == ({}, ("host-0", "host-1"))
    assert job.run.attempt.number == 2


def test_a_host_excluded_by_strikes_is_not_used_even_if_the_scheduler_grants_it() -> None:
    job = scheduled_job()
    loses_host_1(job)
    job.exclude = {"host-1": "2 strikes"}
    job.granted(restarts=1)
    job.leads()
    requeue = only(job.registers("host-0", pid=2), Requeue)
    assert requeue.exclude == ("host-1",)
    assert job.run.attempt.number == 1


def granted_hosts(job: Job, restarts: int, *hosts: str) -> Job:
    """The next allocation has these hosts."""
    job.all_hosts = hosts
    return job.granted(restarts=restarts).running()


def reaches_time_limit(job: Job) -> Requeue:
    """The allocation is near its time limit: the job saves and is queued again."""
    asks_to_leave(job, "time-limit")
    return only(job.stops(), Requeue)


def test_a_drained_host_may_be_used_after_one_allocation_without_it() -> None:
    """Otherwise a job of several weeks would run out of hosts, though all were fixed long ago."""
    job = scheduled_job().running()
    drains(job, "host-1")
    first = only(job.stops(), Requeue)
    assert (first.exclude, first.again) == (("host-1",), ())
    granted_hosts(job, 1, "host-0", "host-2")
    assert "host-1" in job.run.hosts.exclude, "it stays excluded in this allocation"
    second = reaches_time_limit(job)
    assert (second.exclude, second.again) == ((), ("host-1",))
    granted_hosts(job, 2, "host-0", "host-1")
    assert job.run.hosts.exclude == {}
    third = reaches_time_limit(job)
    assert (third.exclude, third.again) == ((), ()), "it is reported once"


def test_a_host_with_strikes_stays_excluded() -> None:
    job = scheduled_job().running()
    drains(job, "host-1")
    job.stops()
    job.exclude = {"host-1": "2 strikes"}
    again = reaches_time_limit(granted_hosts(job, 1, "host-0", "host-2"))
    assert (again.exclude, again.again) == (("host-1",), ())


def test_a_host_excluded_at_submission_is_used_again_when_its_strikes_fade() -> None:
    """Slurm excludes these hosts since the submission, until a requeue changes the list."""
    job = scheduled_job(launch=replace(submitted().launch, exclude=("host-7", "host-8")))
    job.exclude = {"host-7": "2 strikes", "host-8": "2 strikes"}
    first = reaches_time_limit(job.running())
    assert (first.exclude, first.again) == (("host-7", "host-8"), ())
    job.exclude = {"host-8": "2 strikes"}
    second = reaches_time_limit(granted_hosts(job, 1, "host-0", "host-1"))
    assert (second.exclude, second.again) == (("host-8",), ("host-7",))


def test_strikes_that_fade_before_the_first_requeue_do_not_count() -> None:
    job = scheduled_job(launch=replace(submitted().launch, exclude=("host-7",))).running()
    requeue = reaches_time_limit(job)
    assert (requeue.exclude, requeue.again) == ((), ("host-7",))


def test_the_host_of_a_dead_leader_may_be_used_after_one_allocation_without_it() -> None:
    """The agents that requeued the job excluded it."""
    job = scheduled_job().running()
    granted_hosts(job, 1, "host-1", "host-2")
    assert job.run.scheduler.left_out == ("host-0",)
    requeue = reaches_time_limit(job)
    assert (requeue.exclude, requeue.again) == ((), ("host-0",))


def test_a_person_who_submits_again_may_use_every_host() -> None:
    job = scheduled_job()
    loses_host_1(job)
    job.tell(submitted(resume=True))
    assert job.run.hosts.exclude == {}


def test_a_job_waits_some_time_for_a_host_that_may_come_back() -> None:
    job = scheduled_job().running()
    _, again = job.loses("host-1")
    assert again == ReplaceAgent(host="host-1", reason=again.reason)
    assert job.stops("host-0") == ()
    assert job.waits(10) == ()
    only(job.waits(30), Requeue)


def test_a_job_with_shrink_continues_on_the_remaining_hosts() -> None:
    job = scheduled_job(shrink=True)
    replan = only(loses_host_1(job), Replan)
    assert replan == Replan(hosts=1, reason="1 of 2 hosts are left, and no spare")
    start = only(job.tell(Replanned(at=job.now(), plan=plan(1), plan_number=2)), StartAttempt)
    assert (start.hosts, job.run.current.number) == (("host-0",), 2)


def test_a_job_without_a_scheduler_shrinks_too() -> None:
    job = Job(shrink=True)
    replan = only(loses_host_1(job), Replan)
    assert replan.hosts == 1


def test_hosts_that_are_alone_in_their_nvlink_blocks_are_too_few_for_wide_tp_groups() -> None:
    blocks = {"host-0": ("a",), "host-1": ("a",), "host-2": ("b",)}
    wide = replace(plan(), mesh=Mesh(tp=4), switches=blocks)
    job = Job(shrink=True, plan=wide, launch=submitted(spares=1).launch)
    job.leads()
    for host in blocks:
        job.registers(host)
    job.loses("host-1")
    job.stops("host-0")
    why = "Slurm says DOWN"
    replan = only(job.tell(HostUnavailable(at=job.now(), host="host-1", why=why)), Replan)
    assert replan == Replan(
        hosts=2,
        reason="2 of 2 hosts are left, in NVLink blocks with room for 0, and no spare",
    )
    smaller = replace(plan(1), switches=blocks)
    start = only(job.tell(Replanned(at=job.now(), plan=smaller, plan_number=2)), StartAttempt)
    assert start.hosts == ("host-0",)


def test_a_job_without_a_plan_for_fewer_hosts_is_queued_again() -> None:
    job = scheduled_job(shrink=True)
    loses_host_1(job)
    refused = ReplanRefused(at=job.now(), hosts=1, why="the batch does not divide")
    requeue = only(job.tell(refused), Requeue)
    assert requeue.reason.endswith("there is no plan for 1 hosts or fewer")


def test_a_job_waits_for_a_smaller_plan_no_longer_than_for_hosts() -> None:
    job = scheduled_job(shrink=True)
    loses_host_1(job)
    assert job.waits(60) == ()
    requeue = only(job.waits(600), Requeue)
    assert requeue.reason.endswith("there is no plan for 1 hosts or fewer")


def test_a_job_does_not_shrink_below_min_hosts() -> None:
    job = scheduled_job(shrink=True, min_hosts=2)
    requeue = only(loses_host_1(job), Requeue)
    assert requeue.reason.endswith("resilience.min_hosts is 2")


def test_a_shrunk_job_has_its_full_size_in_the_next_allocation() -> None:
    job = scheduled_job(shrink=True)
    loses_host_1(job)
    job.tell(Replanned(at=job.now(), plan=plan(1), plan_number=2))
    asks_to_leave(job, "time-limit")
    job.stops()
    job.all_hosts = ("host-0", "host-2")
    job.granted(restarts=1).starts()
    assert (job.run.attempt.placement, job.run.current.number) == (("host-0", "host-2"), 1)


def test_a_host_that_comes_back_while_a_smaller_plan_is_made_is_used() -> None:
    job = scheduled_job(shrink=True)
    loses_host_1(job)
    start = only(job.registers("host-1", pid=2), StartAttempt)
    assert start.hosts == ("host-0", "host-1")
    assert job.tell(Replanned(at=job.now(), plan=plan(1), plan_number=2)) == ()


def test_an_agent_lost_while_ranks_stop_for_a_drained_host_is_replaced() -> None:
    job = scheduled_job(spares=1).running()
    drains(job, "host-1")
    assert only(job.loses("host-0"), ReplaceAgent).host == "host-0"
    assert job.stops("host-1") == (), "the job waits for the agent of host-0"
    start = only(job.registers("host-0", pid=2), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert (job.run.history.incidents, job.run.history.fruitless) == ((), 0), (
        "a host that the scheduler drains is no failure"
    )


# Hosts that cannot be used


def test_a_host_that_was_culprit_twice_is_excluded() -> None:
    job = scheduled_job(spares=1).running()
    for number in (1, 2):
        job.saves(number)
        job.exits(3, signal=7)  # on host-1
        starts = job.stops()
    assert job.run.hosts.exclude == {"host-1": "rank 3 was killed by SIGBUS (rule repeat-on-host)"}
    assert only(starts, StartAttempt).hosts == ("host-0", "host-2")


def test_without_a_scheduler_a_host_is_excluded_only_if_there_is_a_spare() -> None:
    job = Job().running()
    for number in (1, 2, 3):
        job.saves(number)
        job.exits(3, signal=7)
        job.stops()
    assert (job.run.hosts.exclude, job.run.attempt.placement) == ({}, ("host-0", "host-1"))
    job = Job(spares=1).running()
    for number in (1, 2):
        job.saves(number)
        job.exits(3, signal=7)
        job.stops()
    assert job.run.attempt.placement == ("host-0", "host-2")


def test_hosts_with_strikes_of_other_jobs_are_not_used() -> None:
    job = scheduled_job(spares=1)
    job.exclude = {"host-0": "2 strikes"}
    job.starts()
    assert job.run.attempt.placement == ("host-1", "host-2")


def test_a_host_that_fails_its_own_checks_is_not_used() -> None:
    job = scheduled_job(spares=1)
    job.leads()
    gpu = Finding(what="devices", verdict="stops", found="7 of 8 GPUs", fix="drain it")
    job.registers("host-0", findings=(gpu,))
    job.registers("host-1")
    start = only(job.registers("host-2"), StartAttempt)
    assert start.hosts == ("host-1", "host-2")
    assert job.run.hosts.by_name["host-0"].unfit == "devices: 7 of 8 GPUs (drain it)"
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("preflight", "host-0")
    assert "7 of 8 GPUs" in incident.cause
    job.trains()
    assert not job.run.recovering


def test_a_spare_with_a_defect_does_not_stop_training() -> None:
    job = scheduled_job(spares=1)
    job.starts()
    job.trains()
    gpu = Finding(what="devices", verdict="stops", found="7 of 8 GPUs", fix="drain it")
    job.registers("host-2", pid=2, findings=(gpu,))
    assert job.run.history.incidents[-1].culprit.host == "host-2"
    assert not job.run.recovering


# All hosts are checked together


def test_hosts_are_checked_together_before_ranks_start() -> None:
    job = scheduled_job(preflight=True, spares=1)
    job.leads()
    job.registers("host-0")
    job.registers("host-1")
    check = only(job.registers("host-2"), CheckHosts)
    assert set(check.hosts) == {"host-0", "host-1", "host-2"}
    unfit = {"host-1": "both of its links are slow"}
    start = only(job.tell(HostsChecked(at=job.now(), check=check.check, unfit=unfit)), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("preflight", "host-1")
    job.trains()
    job.loses("host-2")
    job.stops("host-0")
    only(job.registers("host-2", pid=2), StartAttempt)


def test_training_starts_even_if_the_check_does_not_end() -> None:
    job = scheduled_job(preflight=True).starts()
    assert isinstance(job.run.stage, Checking)
    only(job.waits(100), StartAttempt)


def test_the_cost_of_traffic_between_the_hosts_is_in_the_journal() -> None:
    """Hosts below two leaf switches: the gradients of a step leave the host and the leaf."""
    gradients = Traffic(
        axis="dp_shard",
        collective="reduce-scatter",
        what="gradients",
        bytes_per_step=100,
        messages=1,
        level="leaf",
        seconds=0.0,
        exposed_seconds=0.0,
    )
    near = {"host-0": ("spine", "leaf-0"), "host-1": ("spine", "leaf-0")}
    far = {**near, "host-1": ("spine", "leaf-1")}
    found = []
    for switches in (near, far):
        job = scheduled_job(plan=replace(plan(), communication=(gradients,)))
        assert job.allocation is not None
        job.allocation = replace(job.allocation, switches=switches)
        start = only(job.starts().all[-1][1], StartAttempt)
        found.append(start.crossing)
    (out_of_hosts, *beyond), (_, out_of_leaves, *_) = found
    assert out_of_hosts > 0
    assert (sum(beyond), out_of_leaves) == (0, out_of_hosts)


# The `before` hook of the spec, a shell command that runs on each host


def hook_fails(found: str = "exited with code 3; output: no /scratch") -> tuple[Finding, ...]:
    return (Finding(what=BEFORE_HOOK, verdict="stops", found=found, fix="correct it"),)


def test_a_host_on_which_the_hook_fails_is_not_used_and_gets_no_strike() -> None:
    job = scheduled_job(spares=1)
    job.leads()
    job.registers("host-0")
    job.registers("host-1", findings=hook_fails())
    start = only(job.registers("host-2"), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.failure, str(incident.culprit)) == (
        *("preflight", "before-hook"),
        "host-1",
    )
    assert "exited with code 3; output: no /scratch" in incident.cause
    assert strike_weight(incident) == 0.0, "the command of the hook may be wrong"


def test_a_host_on_which_the_hook_fails_is_excluded_from_the_next_allocation() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    requeue = only(job.registers("host-1", findings=hook_fails()), Requeue)
    assert requeue.exclude == ("host-1",)


def test_a_hook_that_fails_on_two_hosts_but_not_on_a_third_is_not_the_cause() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0", findings=hook_fails())
    job.all_hosts = ("host-1", "host-2")
    job.granted(restarts=1).leads()
    job.registers("host-1")
    assert only(job.registers("host-2", findings=hook_fails()), Requeue).exclude


def test_a_hook_that_fails_on_every_host_ends_the_job_as_the_cause() -> None:
    job = scheduled_job()
    job.leads()
    assert only(job.registers("host-0", findings=hook_fails("ended with 127")), Requeue)
    job.all_hosts = ("host-1", "host-2")
    job.granted(restarts=1).leads()
    end = only(job.registers("host-1", findings=hook_fails("ended with 127")), EndJob)
    assert end.state == "FAILED"
    assert end.reason.startswith(
        "cluster.slurm.hooks.before failed on all 2 hosts on which it ran, so it, or what it needs,"
        " is at fault and no host; on host-1: before hook: ended with 127"
    )

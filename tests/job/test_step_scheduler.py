"""What a scheduler does to a job: hosts granted, wanted back, gone for good; leave; come back."""

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
from tests.job.supervise_stage import START, Job, plan, submitted

T = TypeVar("T")
CANCELLED = "cancelled by somebody, in the scheduler (SIGUSR2)"


def one(actions: Sequence[Action], kind: type[T]) -> T:
    """The only action, which must be of this kind."""
    (action,) = actions
    assert isinstance(action, kind)
    return action


def scheduled(**more: Any) -> Job:
    return Job(**more).granted()


def leave(job: Job, cause: Cause | None) -> tuple[Action, ...]:
    return job.tell(LeaveAsked(at=job.now(), cause=cause, words="SIGUSR2"))


def flag(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostFlagged(at=job.now(), host=host, state="DRAINING", reason="bad fan"))


# Leave when asked


def test_to_be_asked_once_more_without_a_cause_changes_nothing() -> None:
    job = scheduled().running()
    leave(job, None)
    leave(job, "preempted")
    assert leave(job, None) == ()
    one(job.stops(), Requeue)


def test_a_plan_for_fewer_hosts_is_not_taken_where_the_host_is_back() -> None:
    job = Job(shrink=True).running()
    job.loses("host-1")
    job.stops("host-0")
    order = one(job.waits(700), Replan)
    assert order.hosts == 1
    one(job.registers("host-1", pid=2), StartAttempt)
    smaller = Replanned(at=job.now(), plan=plan(1), plan_number=2)
    assert job.tell(smaller) == ()
    assert (len(job.run.plan.hosts), job.run.current.number) == (2, 1)


def test_nothing_starts_on_hosts_that_are_being_taken() -> None:
    job = scheduled()
    job.leads()
    job.registers("host-0")
    assert leave(job, None) == ()
    assert job.registers("host-1") == (), "why is still to be told"
    assert job.waits(60) == ()
    assert (type(job.run.stage), job.run.attempt.number) == (Waiting, 0)
    one(leave(job, "preempted"), Requeue)


@pytest.mark.parametrize("cause", ["preempted", "time-limit", "requeued", "unknown"])
def test_a_job_that_is_asked_to_leave_saves_and_goes_back_to_the_queue(cause: Cause) -> None:
    job = scheduled().running()
    stop = one(leave(job, None), StopAttempt)
    assert stop.grace_s == 30.0, "time for a checkpoint"
    assert leave(job, cause) == ()
    job.exits(0, exit_code=210, stopped=False)  # Slurm's signal reached it before the agent's
    job.saves(7)
    requeue = one(job.stops(), Requeue)
    assert requeue.exclude == ()
    assert (type(job.run.stage), job.run.state) == (Queued, "PENDING")
    assert (job.run.history.incidents, job.run.history.restarts, job.run.history.fruitless) == (
        (),
        0,
        0,
    )


def test_a_run_that_broke_is_an_incident_that_blames_no_host_and_the_job_is_queued_again() -> None:
    """The batch script was killed: Slurm ends the run, though nobody asked it to."""
    job = scheduled().running()
    one(leave(job, None), StopAttempt)
    words = "Slurm job 7 is COMPLETING (JobLaunchFailure)"
    told = LeaveAsked(at=job.now(), cause="failed", words=words)
    assert job.tell(told) == ()
    job.exits(1, signal=15)
    job.saves(7)
    requeue = one(job.stops(), Requeue)
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


def test_a_run_that_broke_before_ranks_began_goes_back_to_the_queue_at_once() -> None:
    job = scheduled()
    job.leads()
    job.registers("host-0")
    one(leave(job, "failed"), Requeue)
    assert [incident.kind for incident in job.run.history.incidents] == ["allocation-broke"]


def test_a_rank_that_broke_before_the_batch_script_did_is_the_cause() -> None:
    job = scheduled().running()
    job.exits(1, signal=9)
    leave(job, "failed")
    one(job.stops(), Requeue)
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit.rank) == ("rank-killed", 1)


def test_where_srun_was_killed_the_next_leader_does_not_blame_the_host_of_the_one_before() -> None:
    job = scheduled().running()
    killed = Breakdown(what="SIGKILL ended srun on host-0, and with it all agents", at=job.now())
    assert job.allocation is not None
    job.granted(restarts=1)
    job.allocation = replace(job.allocation, restarts=1, broke_before=killed)
    job.starts().trains()
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit) == ("allocation-broke", NOBODY)
    assert (incident.cause, incident.at) == (killed.what, killed.at)
    assert incident.recovered_after_s is not None
    assert (job.run.history.restarts, job.run.history.fruitless) == (1, 1), (
        "it is taken from the budget"
    )


@pytest.mark.parametrize(
    ("notice_s", "stop_grace", "ends_in_s", "grace_s"),
    [
        (600.0, 30.0, 601.0, 555.0),  # all of it but what asking for the requeue takes
        (600.0, 30.0, 660.0, 555.0),
        (600.0, 30.0, None, 555.0),
        (90.0, 120.0, 91.0, 46.0),  # never beyond the end: there the job would be lost
        (90.0, 120.0, 150.0, 105.0),
        (90.0, 120.0, 7200.0, 120.0),  # a preemption, or a signal sent by hand
        (90.0, 120.0, -60.0, 45.0),  # the end was put off since the leader began
        (90.0, 120.0, None, 120.0),
        (30.0, 30.0, 31.0, 10.0),
        (None, 30.0, 31.0, 30.0),  # of a scheduler that says nothing of it
    ],
)
def test_a_checkpoint_has_all_of_the_notice_and_no_more_than_that(
    notice_s: float | None, stop_grace: float, ends_in_s: float | None, grace_s: float
) -> None:
    job = scheduled(stop_grace=stop_grace)
    assert job.allocation is not None
    ends_at = None if ends_in_s is None else START + 1000.0 + ends_in_s
    job.allocation = replace(job.allocation, notice_s=notice_s, ends_at=ends_at)
    job.running()
    for asked in (
        LeaveAsked(at=START + 1000.0, cause=None, words="SIGUSR2"),
        HostFlagged(at=START + 1000.0, host="host-1", state="DRAINING", reason="bad fan"),
        HostLeaving(at=START + 1000.0, host="host-1", why="SIGTERM"),
    ):
        _, (stop,) = step(job.run, asked)
        assert isinstance(stop, StopAttempt)
        assert stop.grace_s == grace_s


def test_it_goes_on_in_the_next_allocation_from_where_it_was() -> None:
    job = scheduled().running()
    job.saves(7)
    leave(job, "preempted")
    job.stops()
    job.granted(restarts=1)
    job.starts()
    assert job.run.attempt.number == 2
    assert "from checkpoint step-7" in job.run.stage.reason
    assert job.run.history.incidents == ()


def test_a_job_cancelled_in_the_scheduler_ends() -> None:
    job = scheduled().running()
    leave(job, None)
    leave(job, "cancelled")
    end = one(job.stops(), EndJob)
    assert end == EndJob(
        state="CANCELLED", reason="cancelled by somebody, in the scheduler (SIGUSR2)"
    )


def test_whether_to_queue_again_is_not_decided_before_the_cause_is_known() -> None:
    job = scheduled().running()
    leave(job, None)
    assert job.stops() == ()
    end = one(leave(job, "cancelled"), EndJob)
    assert end == EndJob(
        state="CANCELLED", reason="cancelled by somebody, in the scheduler (SIGUSR2)"
    )


def test_a_scheduler_that_never_says_why_gets_the_job_back() -> None:
    job = scheduled().running()
    leave(job, None)
    job.stops()
    one(job.waits(100), Requeue)


def test_ranks_that_finish_while_they_are_asked_to_leave_have_finished() -> None:
    job = scheduled().running()
    leave(job, "time-limit")
    end = one(job.stops(finished=True), EndJob)
    assert end.state == "SUCCEEDED"


def test_before_an_attempt_the_hosts_are_given_back_at_once() -> None:
    job = scheduled()
    job.leads()
    assert leave(job, None) == ()
    one(leave(job, "preempted"), Requeue)


def test_a_failure_before_the_notice_is_an_incident_all_the_same() -> None:
    job = scheduled().running()
    job.exits(1)
    leave(job, "preempted")
    one(job.stops(), Requeue)
    (incident,) = job.run.history.incidents
    assert (incident.kind, job.run.history.restarts) == ("rank-killed", 1)


def test_agents_that_go_while_the_job_leaves_are_not_blamed() -> None:
    job = scheduled().running()
    leave(job, "requeued")
    assert job.loses("host-0") == ()
    assert one(job.stops("host-1"), Requeue).exclude == ()
    assert job.run.history.incidents == ()


# A leader that is lost with its host


def test_the_host_of_a_lost_leader_is_the_culprit() -> None:
    job = scheduled(spares=1).running()
    job.granted(restarts=1)
    job.leads()
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("leader-lost", "host-0")


# Hosts that are wanted back


def test_a_drained_host_is_left_at_a_checkpoint_for_a_spare() -> None:
    job = scheduled(spares=1).running()
    stop = one(flag(job, "host-1"), StopAttempt)
    assert (stop.grace_s, stop.reason) == (30.0, "host-1 is DRAINING: bad fan")
    job.exits(2, exit_code=210)
    start = one(job.stops(), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert job.run.history.incidents == ()


def test_a_drained_host_without_a_spare_sends_the_job_back_to_the_queue() -> None:
    job = scheduled().running()
    flag(job, "host-1")
    requeue = one(job.stops(), Requeue)
    assert requeue.exclude == ("host-1",)


def test_a_job_whose_leader_sits_on_a_drained_host_goes_back_to_the_queue() -> None:
    job = scheduled(spares=1).running()
    flag(job, "host-0")
    assert one(job.stops(), Requeue).exclude == ("host-0",)


def test_a_drained_spare_is_only_left_out() -> None:
    job = scheduled(spares=1).running()
    assert flag(job, "host-2") == ()
    assert flag(job, "host-2") == ()
    job.loses("host-1")
    requeue = one([*job.stops("host-0"), *job.waits(30)][-1:], Requeue)
    assert "host-2" in requeue.exclude


# Too few hosts


def lost_one(job: Job) -> tuple[Action, ...]:
    """One of two hosts goes and no agent can be had there any more."""
    job.running()
    job.saves(5)
    job.loses("host-1")
    job.stops("host-0")
    return job.tell(HostUnavailable(at=job.now(), host="host-1", why="Slurm says DOWN"))


def test_without_spare_and_shrink_a_job_is_queued_again_without_the_bad_host() -> None:
    job = scheduled()
    requeue = one(lost_one(job), Requeue)
    assert requeue == Requeue(
        exclude=("host-1",),
        reason="1 of 2 hosts are left, and no spare; resilience.shrink does not allow fewer hosts",
    )


def test_a_host_whose_agent_never_came_is_not_asked_for_again() -> None:
    """Each run on it would wait for `init_timeout` in vain."""
    job = scheduled()
    job.leads()
    job.registers("host-0")
    assert one(job.waits(600.0), Requeue).exclude == ("host-1",)


@pytest.mark.parametrize(
    ("came", "blamed"), [(7, ("host-7",)), (4, ("host-4", "host-5", "host-6", "host-7")), (2, ())]
)
def test_where_most_agents_do_not_come_it_is_not_their_hosts(
    came: int, blamed: tuple[str, ...]
) -> None:
    """A file server, or the leader's own network, is too slow for all of them."""
    job = scheduled(hosts=8)
    job.leads()
    for number in range(came):
        job.registers(f"host-{number}")
    requeue = one(job.waits(600.0), Requeue)
    assert requeue.exclude == blamed
    told = f"; {8 - came} of 8 never had an agent within 600 s: too many to exclude their hosts"
    assert (told in requeue.reason) == (not blamed)


def test_a_requeue_that_is_refused_for_good_ends_the_job() -> None:
    job = scheduled().running()
    assert job.tell(RequeueRefused(at=job.now(), why="disabled")) == (), "nobody asked"
    leave(job, "time-limit")
    job.stops()
    end = one(job.tell(RequeueRefused(at=job.now(), why="disabled")), EndJob)
    assert end.state == "FAILED"
    assert end.reason == (
        "the time limit of the allocation is near (SIGUSR2); it could not be queued again:"
        " disabled; resume with `ndctl submit SPEC --resume`"
    )


def test_one_that_is_refused_because_the_job_was_cancelled_is_no_failure() -> None:
    job = scheduled().running()
    leave(job, "time-limit")
    job.stops()
    refused = RequeueRefused(at=job.now(), why="Slurm job 7 has ended", cancelled=True)
    assert one(job.tell(refused), EndJob).state == "CANCELLED"
    assert job.run.state == "CANCELLED"


@pytest.mark.parametrize("lost", [True, False])
def test_a_bad_host_that_the_scheduler_gives_again_is_used_again(lost: bool) -> None:
    """It has the host back, and there may be no other: nobody else would ever let it in again."""
    job = scheduled()
    if lost:
        lost_one(job)
    else:
        flag(job.running(), "host-1")
        job.stops()
    job.granted(restarts=1).running()
    assert (job.run.hosts.exclude, job.run.attempt.placement) == ({}, ("host-0", "host-1"))
    assert job.run.attempt.number == 2


def test_a_struck_host_that_the_scheduler_gives_all_the_same_is_not_used() -> None:
    job = scheduled()
    lost_one(job)
    job.exclude = {"host-1": "2 strikes"}
    job.granted(restarts=1)
    job.leads()
    requeue = one(job.registers("host-0", pid=2), Requeue)
    assert requeue.exclude == ("host-1",)
    assert job.run.attempt.number == 1


def given(job: Job, restarts: int, *hosts: str) -> Job:
    """The next allocation has other hosts."""
    job.everywhere = hosts
    return job.granted(restarts=restarts).running()


def limit_near(job: Job) -> Requeue:
    """The time limit of a run: it leaves with a checkpoint, and goes on in the next one."""
    leave(job, "time-limit")
    return one(job.stops(), Requeue)


def test_a_host_that_was_drained_may_be_used_after_a_run_without_it() -> None:
    """Otherwise a job of weeks would run out of hosts, although all were fixed long ago."""
    job = scheduled().running()
    flag(job, "host-1")
    first = one(job.stops(), Requeue)
    assert (first.exclude, first.again) == (("host-1",), ())
    given(job, 1, "host-0", "host-2")
    assert "host-1" in job.run.hosts.exclude, "of this run it stays out"
    second = limit_near(job)
    assert (second.exclude, second.again) == ((), ("host-1",))
    given(job, 2, "host-0", "host-1")
    assert job.run.hosts.exclude == {}
    third = limit_near(job)
    assert (third.exclude, third.again) == ((), ()), "it is said once"


def test_a_host_that_strikes_speak_against_stays_left_out() -> None:
    job = scheduled().running()
    flag(job, "host-1")
    job.stops()
    job.exclude = {"host-1": "2 strikes"}
    again = limit_near(given(job, 1, "host-0", "host-2"))
    assert (again.exclude, again.again) == (("host-1",), ())


def test_a_host_that_strikes_left_out_at_submission_is_used_again_when_they_fade() -> None:
    """Slurm was told of it with the job, and leaves it out until it is told otherwise."""
    job = scheduled(launch=replace(submitted().launch, exclude=("host-7", "host-8")))
    job.exclude = {"host-7": "2 strikes", "host-8": "2 strikes"}
    first = limit_near(job.running())
    assert (first.exclude, first.again) == (("host-7", "host-8"), ())
    job.exclude = {"host-8": "2 strikes"}
    second = limit_near(given(job, 1, "host-0", "host-1"))
    assert (second.exclude, second.again) == (("host-8",), ("host-7",))


def test_strikes_that_fade_before_the_first_requeue_count_no_more() -> None:
    job = scheduled(launch=replace(submitted().launch, exclude=("host-7",))).running()
    requeue = limit_near(job)
    assert (requeue.exclude, requeue.again) == ((), ("host-7",))


def test_the_host_of_a_leader_that_died_may_be_used_after_a_run_without_it() -> None:
    """Its followers had it left out."""
    job = scheduled().running()
    given(job, 1, "host-1", "host-2")
    assert job.run.scheduler.left_out == ("host-0",)
    requeue = limit_near(job)
    assert (requeue.exclude, requeue.again) == ((), ("host-0",))


def test_a_person_who_submits_again_may_use_every_host() -> None:
    job = scheduled()
    lost_one(job)
    job.tell(submitted(resume=True))
    assert job.run.hosts.exclude == {}


def test_a_host_that_may_come_back_is_waited_for_a_while() -> None:
    job = scheduled().running()
    _, again = job.loses("host-1")
    assert again == ReplaceAgent(host="host-1", reason=again.reason)
    assert job.stops("host-0") == ()
    assert job.waits(10) == ()
    one(job.waits(30), Requeue)


def test_a_job_that_may_shrink_goes_on_with_the_hosts_that_are_left() -> None:
    job = scheduled(shrink=True)
    replan = one(lost_one(job), Replan)
    assert replan == Replan(hosts=1, reason="1 of 2 hosts are left, and no spare")
    start = one(job.tell(Replanned(at=job.now(), plan=plan(1), plan_number=2)), StartAttempt)
    assert (start.hosts, job.run.current.number) == (("host-0",), 2)


def test_a_job_shrinks_without_a_scheduler_as_well() -> None:
    job = Job(shrink=True)
    replan = one(lost_one(job), Replan)
    assert replan.hosts == 1


def test_hosts_that_are_left_alone_in_their_blocks_are_too_few_for_wide_tp_groups() -> None:
    blocks = {"host-0": ("a",), "host-1": ("a",), "host-2": ("b",)}
    wide = replace(plan(), mesh=Mesh(tp=4), switches=blocks)
    job = Job(shrink=True, plan=wide, launch=submitted(spares=1).launch)
    job.leads()
    for host in blocks:
        job.registers(host)
    job.loses("host-1")
    job.stops("host-0")
    why = "Slurm says DOWN"
    replan = one(job.tell(HostUnavailable(at=job.now(), host="host-1", why=why)), Replan)
    assert replan == Replan(
        hosts=2,
        reason="2 of 2 hosts are left, in NVLink blocks with room for 0, and no spare",
    )
    smaller = replace(plan(1), switches=blocks)
    start = one(job.tell(Replanned(at=job.now(), plan=smaller, plan_number=2)), StartAttempt)
    assert start.hosts == ("host-0",)


def test_a_job_that_cannot_be_planned_smaller_is_queued_again() -> None:
    job = scheduled(shrink=True)
    lost_one(job)
    refused = ReplanRefused(at=job.now(), hosts=1, why="the batch does not divide")
    requeue = one(job.tell(refused), Requeue)
    assert requeue.reason.endswith("there is no plan for 1 hosts or fewer")


def test_a_smaller_plan_that_never_comes_is_not_waited_for_longer_than_hosts_are() -> None:
    job = scheduled(shrink=True)
    lost_one(job)
    assert job.waits(60) == ()
    requeue = one(job.waits(600), Requeue)
    assert requeue.reason.endswith("there is no plan for 1 hosts or fewer")


def test_a_job_does_not_shrink_below_its_least_number_of_hosts() -> None:
    job = scheduled(shrink=True, min_hosts=2)
    requeue = one(lost_one(job), Requeue)
    assert requeue.reason.endswith("resilience.min_hosts is 2")


def test_a_shrunk_job_is_its_full_size_again_in_a_new_allocation() -> None:
    job = scheduled(shrink=True)
    lost_one(job)
    job.tell(Replanned(at=job.now(), plan=plan(1), plan_number=2))
    leave(job, "time-limit")
    job.stops()
    job.everywhere = ("host-0", "host-2")
    job.granted(restarts=1).starts()
    assert (job.run.attempt.placement, job.run.current.number) == (("host-0", "host-2"), 1)


def test_a_host_that_came_back_while_a_smaller_plan_was_made_is_used() -> None:
    job = scheduled(shrink=True)
    lost_one(job)
    start = one(job.registers("host-1", pid=2), StartAttempt)
    assert start.hosts == ("host-0", "host-1")
    assert job.tell(Replanned(at=job.now(), plan=plan(1), plan_number=2)) == ()


def test_an_agent_that_dies_while_ranks_leave_for_a_drained_host_is_asked_for_again() -> None:
    job = scheduled(spares=1).running()
    flag(job, "host-1")
    assert one(job.loses("host-0"), ReplaceAgent).host == "host-0"
    assert job.stops("host-1") == (), "the agent of host-0 is waited for"
    start = one(job.registers("host-0", pid=2), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert (job.run.history.incidents, job.run.history.fruitless) == ((), 0), (
        "whom the scheduler moves is no fault"
    )


# Hosts that cannot be used


def test_a_host_that_was_culprit_twice_is_not_used_any_more() -> None:
    job = scheduled(spares=1).running()
    for number in (1, 2):
        job.saves(number)
        job.exits(3, signal=7)  # on host-1
        starts = job.stops()
    assert job.run.hosts.exclude == {"host-1": "rank 3 was killed by SIGBUS (rule repeat-on-host)"}
    assert one(starts, StartAttempt).hosts == ("host-0", "host-2")


def test_without_a_scheduler_no_host_is_given_up_but_for_a_spare() -> None:
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


def test_hosts_that_broke_other_jobs_are_not_used() -> None:
    job = scheduled(spares=1)
    job.exclude = {"host-0": "2 strikes"}
    job.starts()
    assert job.run.attempt.placement == ("host-1", "host-2")


def test_a_host_whose_own_look_at_it_found_a_defect_is_not_used() -> None:
    job = scheduled(spares=1)
    job.leads()
    gpu = Finding(what="devices", verdict="stops", found="7 of 8 GPUs", fix="drain it")
    job.registers("host-0", findings=(gpu,))
    job.registers("host-1")
    start = one(job.registers("host-2"), StartAttempt)
    assert start.hosts == ("host-1", "host-2")
    assert job.run.hosts.by_name["host-0"].unfit == "devices: 7 of 8 GPUs (drain it)"
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("preflight", "host-0")
    assert "7 of 8 GPUs" in incident.cause
    job.trains()
    assert not job.run.recovering


def test_a_spare_that_comes_with_a_defect_holds_nobody_up() -> None:
    job = scheduled(spares=1)
    job.starts()
    job.trains()
    gpu = Finding(what="devices", verdict="stops", found="7 of 8 GPUs", fix="drain it")
    job.registers("host-2", pid=2, findings=(gpu,))
    assert job.run.history.incidents[-1].culprit.host == "host-2"
    assert not job.run.recovering


# Hosts are tried together


def test_hosts_are_tried_together_before_ranks_start() -> None:
    job = scheduled(preflight=True, spares=1)
    job.leads()
    job.registers("host-0")
    job.registers("host-1")
    check = one(job.registers("host-2"), CheckHosts)
    assert set(check.hosts) == {"host-0", "host-1", "host-2"}
    unfit = {"host-1": "both of its links are slow"}
    start = one(job.tell(HostsChecked(at=job.now(), check=check.check, unfit=unfit)), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("preflight", "host-1")
    job.trains()
    job.loses("host-2")
    job.stops("host-0")
    one(job.registers("host-2", pid=2), StartAttempt)


def test_a_check_that_does_not_end_keeps_nobody_from_training() -> None:
    job = scheduled(preflight=True).starts()
    assert isinstance(job.run.stage, Checking)
    one(job.waits(100), StartAttempt)


def test_what_these_hosts_cost_is_in_the_journal() -> None:
    """Two nodes below two leaves: the gradients of a step leave the host and the leaf."""
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
        job = scheduled(plan=replace(plan(), communication=(gradients,)))
        assert job.allocation is not None
        job.allocation = replace(job.allocation, switches=switches)
        start = one(job.starts().all[-1][1], StartAttempt)
        found.append(start.crossing)
    (out_of_hosts, *beyond), (_, out_of_leaves, *_) = found
    assert out_of_hosts > 0
    assert (sum(beyond), out_of_leaves) == (0, out_of_hosts)


# The spec's own line of shell on each host


def hook_fails(said: str = "ended with 3; it said: no /scratch") -> tuple[Finding, ...]:
    return (Finding(what=BEFORE_HOOK, verdict="stops", found=said, fix="correct it"),)


def test_a_host_on_which_the_hook_fails_is_not_used_and_struck_by_nobody() -> None:
    job = scheduled(spares=1)
    job.leads()
    job.registers("host-0")
    job.registers("host-1", findings=hook_fails())
    start = one(job.registers("host-2"), StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.failure, str(incident.culprit)) == (
        *("preflight", "before-hook"),
        "host-1",
    )
    assert "ended with 3; it said: no /scratch" in incident.cause
    assert strike_weight(incident) == 0.0, "the line of shell may be wrong"


def test_a_host_on_which_the_hook_fails_is_done_without_in_the_next_run() -> None:
    job = scheduled()
    job.leads()
    job.registers("host-0")
    requeue = one(job.registers("host-1", findings=hook_fails()), Requeue)
    assert requeue.exclude == ("host-1",)


def test_a_hook_that_fails_on_two_hosts_and_not_on_a_third_is_not_to_blame() -> None:
    job = scheduled()
    job.leads()
    job.registers("host-0", findings=hook_fails())
    job.everywhere = ("host-1", "host-2")
    job.granted(restarts=1).leads()
    job.registers("host-1")
    assert one(job.registers("host-2", findings=hook_fails()), Requeue).exclude


def test_a_hook_that_fails_on_every_host_ends_the_job_and_is_itself_to_blame() -> None:
    job = scheduled()
    job.leads()
    assert one(job.registers("host-0", findings=hook_fails("ended with 127")), Requeue)
    job.everywhere = ("host-1", "host-2")
    job.granted(restarts=1).leads()
    end = one(job.registers("host-1", findings=hook_fails("ended with 127")), EndJob)
    assert end.state == "FAILED"
    assert end.reason.startswith(
        "cluster.slurm.hooks.before failed on all 2 hosts on which it ran, so it, or what it needs,"
        " is at fault and no host; on host-1: before hook: ended with 127"
    )

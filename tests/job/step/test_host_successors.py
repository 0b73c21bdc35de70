"""The scheduler replaces hosts itself (Kubernetes): the other agents wait for the successor."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from msgspec.structs import replace

from orchestrator.contract.check_results import Finding
from orchestrator.contract.messages.actions import (
    Action,
    ReplaceAgent,
    Replan,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import (
    HostFlagged,
    HostLeaving,
    HostOpened,
    LeaveAsked,
    Tick,
)
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.hosts.host_pool import MOST_DOUBLINGS
from orchestrator.job.hosts.host_replacement import AGAIN_S
from orchestrator.job.stage import Running, Starting, Waiting
from tests.job.job_driver import Job

T = TypeVar("T")
SUCCESSOR_S = 300.0
BROKEN = Finding(what="devices", verdict="stops", found="1 of 2 devices", fix="replace it")


def only(actions: Sequence[Action], kind: type[T]) -> T:
    (action,) = actions
    assert isinstance(action, kind)
    return action


def scheduled_job(spares: int = 0, shrink: bool = False) -> Job:
    return Job(spares=spares, shrink=shrink).granted(successor_s=SUCCESSOR_S)


def leaves(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostLeaving(at=job.now(), host=host, why="SIGTERM"))


def is_cordoned(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostFlagged(at=job.now(), host=host, state="cordoned", reason=""))


def is_opened(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostOpened(at=job.now(), host=host))


def test_another_host_replaces_a_lost_host() -> None:
    job = scheduled_job().running()
    _, asked = job.loses("host-1")
    assert isinstance(asked, ReplaceAgent)
    assert (asked.host, asked.elsewhere) == ("host-1", False)
    assert job.stops("host-0") == ()
    assert job.waits(200) == (), "the scheduler looks for a host"
    start = only(job.registers("host-7"), StartAttempt)
    assert start.hosts == ("host-0", "host-7")
    assert job.run.hosts.exclude == {}, "a pod that moved is no reason to exclude its old host"


def test_a_successor_may_run_on_the_same_host() -> None:
    job = scheduled_job().running()
    job.loses("host-1")
    job.stops("host-0")
    start = only(job.registers("host-1", pid=2), StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_a_job_without_a_successor_releases_all_hosts_after_the_wait() -> None:
    job = scheduled_job().running()
    job.loses("host-1")
    job.stops("host-0")
    assert job.waits(SUCCESSOR_S - 10) == ()
    requeue = only(job.waits(20), Requeue)
    assert (requeue.whole, requeue.exclude) == (True, ())


def waits_without_successor(job: Job) -> float:
    """Seconds until the job releases all hosts. Afterwards one of two hosts is granted again."""
    began = job.at
    while not (actions := job.waits(30)):
        assert job.at < began + 1e6, "the job never releases its hosts"
    assert only(actions, Requeue).whole
    waited_s = job.at - began
    assert job.allocation is not None
    job.allocation = replace(job.allocation, hosts=("host-0",))
    job.leads()
    job.registers("host-0")
    return waited_s


def test_the_wait_for_a_successor_doubles_each_time_it_is_in_vain() -> None:
    """A job that finds no host restarts its pods, and writes its journal, more and more rarely."""
    job = scheduled_job().running()
    job.loses("host-1")
    job.stops("host-0")
    short_since, lines = job.run.stage.since, len(job.all)
    waits = [waits_without_successor(job) for _ in range(9)]
    doubled = [SUCCESSOR_S * 2 ** min(times, MOST_DOUBLINGS) for times in range(9)]
    assert waits == pytest.approx(doubled, abs=35)
    assert (job.run.scheduler.given_back, job.run.scheduler.short_since) == (9, short_since)
    events = [event for event, _ in job.all[lines:] if not isinstance(event, Tick)]
    assert len(events) == 9 * 2, "one leader and one agent each time"


def test_the_wait_is_short_again_after_an_attempt_has_started() -> None:
    job = scheduled_job().running()
    job.loses("host-1")
    job.stops("host-0")
    waits_without_successor(job)
    waits_without_successor(job)
    only(job.registers("host-7"), StartAttempt)
    assert job.run.scheduler.given_back == 0
    job.trains()
    job.loses("host-7")
    job.stops("host-0")
    assert waits_without_successor(job) == pytest.approx(SUCCESSOR_S, abs=35)


def test_a_job_with_shrink_continues_on_fewer_hosts_after_the_wait() -> None:
    job = scheduled_job(shrink=True).running()
    job.loses("host-1")
    job.stops("host-0")
    assert job.waits(SUCCESSOR_S - 10) == ()
    assert only(job.waits(20), Replan).hosts == 1


def test_a_host_that_must_leave_costs_no_budget_and_no_step() -> None:
    job = scheduled_job().running()
    stop = only(leaves(job, "host-1"), StopAttempt)
    assert stop.grace_s == 30.0, "time for a checkpoint"
    job.saves(7)
    assert job.stops() == ()
    assert job.loses("host-1") == (), (
        "the loss was announced, so the successor is requested already"
    )
    assert isinstance(job.run.stage, Waiting)
    start = only(job.registers("host-1", pid=2), StartAttempt)
    assert start.hosts == ("host-0", "host-1")
    assert (job.run.history.incidents, job.run.history.fruitless, job.run.history.restarts) == (
        (),
        0,
        0,
    )


def test_an_announced_loss_before_the_ranks_stopped_is_no_incident() -> None:
    job = scheduled_job().running()
    leaves(job, "host-1")
    job.loses("host-1")
    job.stops("host-0")
    assert (type(job.run.stage), job.run.history.incidents) == (Waiting, ())


EVICTED = "Evicted: the node was low on memory"


@pytest.mark.parametrize("with_errors", [False, True])
def test_a_host_preempted_without_notice_costs_no_budget(with_errors: bool) -> None:
    """Errors of its peers about the lost connection are no incident either."""
    job = scheduled_job().running()
    if with_errors:
        job.raises(0, "Connection closed by peer")
    job.loses("host-1", taken=EVICTED)
    job.stops("host-0")
    assert (type(job.run.stage), job.run.history.incidents) == (Waiting, ())
    assert job.run.stage.reason == f"the scheduler took host-1 ({EVICTED})"
    assert only(job.registers("host-7"), StartAttempt).hosts == ("host-0", "host-7")
    assert (job.run.history.fruitless, job.run.history.restarts) == (0, 0)


def test_a_failure_before_a_host_was_preempted_is_an_incident() -> None:
    job = scheduled_job().running()
    job.exits(0)
    job.waits(5)
    job.loses("host-1", taken=EVICTED)
    job.stops("host-0")
    (incident,) = job.run.history.incidents
    assert (incident.culprit.rank, job.run.history.restarts) == (0, 1)


def test_a_preempted_host_that_is_back_before_its_loss_was_noticed_is_no_incident() -> None:
    job = scheduled_job().running()
    job.registers("host-1", pid=2, taken=EVICTED)
    job.stops("host-0")
    assert (job.run.history.incidents, job.run.history.fruitless, job.run.history.restarts) == (
        (),
        0,
        0,
    )
    assert (type(job.run.stage), job.run.attempt.number) == (Starting, 2)


def test_a_host_preempted_while_the_job_waits_costs_no_budget() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    assert job.loses("host-0", taken=EVICTED) == ()
    assert job.run.history.fruitless == 0


def test_hosts_lost_together_have_no_culprit_if_the_scheduler_asks_for_them_meanwhile() -> None:
    """Seed 204474 of the simulation: the leader is cut off from all hosts. It reports the others a
    second later than the first, and has been asked to leave by then."""
    job = Job(hosts=3).granted(successor_s=SUCCESSOR_S).running()
    job.loses("host-1", silent_s=10.3)
    job.tell(LeaveAsked(at=job.now(), cause="unknown", words="SIGTERM"))
    job.loses("host-2", silent_s=12.0)
    job.stops("host-0")
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit) == ("hosts-lost", NOBODY)


def test_a_host_lost_and_replaced_before_its_successor_was_preempted_is_an_incident() -> None:
    """Seed 108948 of the simulation: an agent is killed while no rank runs. Another one connects
    before the loss is noticed, and eight seconds later its pod is evicted."""
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    job.registers("host-0", pid=2)
    job.loses("host-0", taken=EVICTED)
    job.waits(3)
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.culprit.host) == ("host-lost", "host-0")
    assert incident.cause == "the agent of host-0 is gone: another agent took its place"


def test_a_preempted_leader_is_no_incident() -> None:
    job = scheduled_job().running()
    job.leads(taken=EVICTED)
    assert (type(job.run.stage), job.run.history.incidents) == (Waiting, ())
    assert (job.run.history.fruitless, job.run.history.restarts) == (0, 0)


def test_a_spare_that_must_leave_does_not_stop_the_attempt() -> None:
    job = scheduled_job(spares=1).running()
    assert leaves(job, "host-2") == ()
    assert job.loses("host-2") == ()
    assert isinstance(job.run.stage, Running)


def test_a_spare_replaces_a_leaving_host_at_once() -> None:
    job = scheduled_job(spares=1).running()
    leaves(job, "host-1")
    start = only(job.stops(), StartAttempt)
    assert start.hosts == ("host-0", "host-2")


def test_a_host_that_leaves_while_the_job_waits_costs_no_budget() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    assert leaves(job, "host-0") == ()
    assert job.loses("host-0") == ()
    assert job.run.history.fruitless == 0


def test_a_second_notice_that_a_host_leaves_changes_nothing() -> None:
    job = scheduled_job().running()
    leaves(job, "host-1")
    assert leaves(job, "host-1") == ()


def test_a_host_with_a_defect_is_replaced_once() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    order = only(job.registers("host-1", findings=(BROKEN,)), ReplaceAgent)
    assert (order.host, order.elsewhere) == ("host-1", True)
    assert job.waits(10) == ()
    job.loses("host-1")
    start = only(job.registers("host-7"), StartAttempt)
    assert start.hosts == ("host-0", "host-7")


def comes_back(job: Job, host: str, pid: int) -> float:
    """Seconds until a host that came back with the same defect is replaced again."""
    assert job.loses(host) == ()
    assert job.registers(host, pid=pid, findings=(BROKEN,)) == ()
    registered_at = job.at
    while not (asked := job.waits(1)):
        assert job.at < registered_at + SUCCESSOR_S
    assert only(asked, ReplaceAgent).elsewhere
    return job.at - registered_at


def test_a_tick_while_waiting_for_a_successor_changes_no_state() -> None:
    job = scheduled_job().running()
    job.loses("host-1")
    job.stops("host-0")
    job.waits(40)
    waiting = job.run
    assert isinstance(waiting.stage, Waiting)
    assert job.waits(1) == ()
    assert job.run is waiting


def test_a_defect_host_that_comes_back_is_replaced_later_each_time_with_the_reason() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    job.registers("host-1", findings=(BROKEN,))
    stays = [comes_back(job, "host-1", pid) for pid in (2, 3, 4)]
    assert stays[0] < AGAIN_S < stays[1] < 2 * AGAIN_S < stays[2] < 4 * AGAIN_S
    assert job.run.stage.reason == (
        "1 of 2 hosts are left, and no spare; host-1 is not used (devices: 1 of 2 devices"
        " (replace it)),"
        " was replaced 3 times, and came back"
    )
    job.loses("host-1")
    start = only(job.registers("host-7"), StartAttempt)
    assert start.hosts == ("host-0", "host-7")
    assert job.run.hosts.away == {}
    assert job.run.history.fruitless == 0, "the job itself requested each loss"


def test_a_tick_while_an_unused_host_waits_to_be_replaced_again_changes_no_state() -> None:
    job = scheduled_job()
    job.leads()
    job.registers("host-0")
    job.registers("host-1", findings=(BROKEN,))
    job.loses("host-1")
    job.registers("host-1", pid=2, findings=(BROKEN,))
    job.waits(1)
    waiting = job.run
    assert "came back" in waiting.stage.reason
    assert job.waits(1) == ()
    assert job.run is waiting


def test_a_leader_that_comes_back_to_a_defect_host_does_not_leave_at_once() -> None:
    job = scheduled_job()
    job.leads()
    only(job.registers("host-0", findings=(BROKEN,)), Requeue)
    job.leads()
    assert job.registers("host-0", pid=2, findings=(BROKEN,)) == ()
    assert "host-0 is not used" in job.run.stage.reason
    assert not only(job.waits(AGAIN_S), Requeue).whole


def test_a_leader_on_a_defect_host_releases_only_that_host() -> None:
    job = scheduled_job()
    job.leads()
    requeue = only(job.registers("host-0", findings=(BROKEN,)), Requeue)
    assert (requeue.whole, requeue.exclude) == (False, ("host-0",))


def test_a_cordoned_host_is_replaced_at_a_checkpoint() -> None:
    job = scheduled_job().running()
    only(is_cordoned(job, "host-1"), StopAttempt)
    order = only(job.stops(), ReplaceAgent)
    assert (order.host, order.elsewhere, order.shut) == ("host-1", True, True)
    assert job.run.history.incidents == ()


def test_a_host_is_excluded_only_while_it_is_cordoned() -> None:
    """Nodes are upgraded one after the other: the first may be used when the last is cordoned."""
    job = scheduled_job().running()
    is_cordoned(job, "host-1")
    job.stops()
    job.loses("host-1")
    start = only(job.registers("host-7"), StartAttempt)
    assert start.hosts == ("host-0", "host-7")
    assert is_opened(job, "host-1") == ()
    assert (job.run.hosts.exclude, job.run.hosts.shut) == ({}, ())
    job.trains()
    job.waits(60)
    is_cordoned(job, "host-7")
    assert only(job.stops(), ReplaceAgent).host == "host-7"
    job.loses("host-7")
    again = only(job.registers("host-1", pid=2), StartAttempt)
    assert again.hosts == ("host-0", "host-1")
    assert (job.run.history.incidents, job.run.history.fruitless) == ((), 0)


def test_a_host_that_is_uncordoned_before_its_pod_is_deleted_keeps_its_pod() -> None:
    job = scheduled_job().running()
    is_cordoned(job, "host-1")
    only(job.stops(), ReplaceAgent)
    start = only(is_opened(job, "host-1"), StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_a_requeue_does_not_exclude_cordoned_hosts_by_name() -> None:
    """The scheduler keeps pods off them, and an exclusion by name would last as long as the job."""
    job = scheduled_job().running()
    is_cordoned(job, "host-1")
    job.stops()
    job.loses("host-1")
    requeue = only(job.waits(SUCCESSOR_S + 10), Requeue)
    assert (requeue.whole, requeue.exclude) == (True, ())
    job.leads()
    assert (set(job.run.hosts.exclude), job.run.hosts.shut) == ({"host-1"}, ("host-1",))
    job.leads()
    assert job.run.hosts.shut == ("host-1",), "a leader that follows a dead leader knows it too"
    is_opened(job, "host-1")
    assert job.run.hosts.exclude == {}


def test_a_host_with_a_defect_stays_excluded_when_it_is_uncordoned() -> None:
    job = scheduled_job()
    job.leads()
    is_cordoned(job, "host-1")
    job.registers("host-0")
    order = only(job.registers("host-1", findings=(BROKEN,)), ReplaceAgent)
    assert (order.elsewhere, order.shut) == (True, False)
    is_opened(job, "host-1")
    assert job.run.hosts.by_name["host-1"].unfit
    assert only(job.registers("host-7"), StartAttempt).hosts == ("host-0", "host-7")


def test_only_the_pod_of_the_leader_is_replaced_if_its_host_is_cordoned() -> None:
    job = scheduled_job().running()
    only(is_cordoned(job, "host-0"), StopAttempt)
    requeue = only(job.stops(), Requeue)
    assert (requeue.whole, requeue.exclude) == (False, ())
    job.leads()
    assert "host-0" in job.run.hosts.exclude, "the next leader knows it too"


def test_a_leader_that_must_leave_keeps_the_other_pods() -> None:
    job = scheduled_job().running()
    only(job.tell(LeaveAsked(at=job.now(), cause=None, words="SIGTERM")), StopAttempt)
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    requeue = only(job.stops(), Requeue)
    assert (requeue.whole, requeue.exclude) == (False, ())
    job.starts()
    assert (job.run.attempt.number, job.run.history.incidents, job.run.history.fruitless) == (
        2,
        (),
        0,
    )


def test_a_leader_that_must_leave_before_an_attempt_keeps_the_other_pods() -> None:
    job = scheduled_job()
    job.leads()
    job.tell(LeaveAsked(at=job.now(), cause=None, words="SIGTERM"))
    requeue = only(
        job.tell(LeaveAsked(at=job.now(), cause="drained", words="SIGTERM")),
        Requeue,
    )
    assert not requeue.whole


def test_a_cordoned_host_with_strikes_stays_excluded_when_it_is_uncordoned() -> None:
    """The next leader knows the strikes."""
    job = Job().granted(successor_s=300.0).running()
    is_cordoned(job, "host-1")
    assert job.run.hosts.shut == ("host-1",)
    job.exclude = {"host-1": "2 strikes"}
    job.leads()
    assert not job.run.hosts.shut
    job.tell(HostOpened(at=job.now(), host="host-1"))
    assert job.run.hosts.exclude == {"host-1": "2 strikes"}

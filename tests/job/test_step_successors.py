"""A scheduler that replaces hosts itself: the others wait in place for the successor."""

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
from orchestrator.job.hosts.host_pool import MOST_DOUBLINGS
from orchestrator.job.hosts.host_replacement import AGAIN_S
from orchestrator.job.stage import Running, Starting, Waiting
from tests.job.supervise_stage import Job

T = TypeVar("T")
PATIENCE_S = 300.0
BROKEN = Finding(what="devices", verdict="stops", found="1 of 2 devices", fix="replace it")


def one(actions: Sequence[Action], kind: type[T]) -> T:
    (action,) = actions
    assert isinstance(action, kind)
    return action


def scheduled(spares: int = 0, shrink: bool = False) -> Job:
    return Job(spares=spares, shrink=shrink).granted(successor_s=PATIENCE_S)


def leaving(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostLeaving(at=job.now(), host=host, why="SIGTERM"))


def flagged(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostFlagged(at=job.now(), host=host, state="cordoned", reason=""))


def opened(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostOpened(at=job.now(), host=host))


def test_another_host_takes_the_place_of_one_that_died() -> None:
    job = scheduled().running()
    _, asked = job.loses("host-1")
    assert isinstance(asked, ReplaceAgent)
    assert (asked.host, asked.elsewhere) == ("host-1", False)
    assert job.stops("host-0") == ()
    assert job.waits(200) == (), "the scheduler looks for one"
    start = one(job.registers("host-7"), StartAttempt)
    assert start.hosts == ("host-0", "host-7")
    assert job.run.hosts.exclude == {}, "a pod that moved says nothing against a host"


def test_a_successor_may_come_to_the_same_host() -> None:
    job = scheduled().running()
    job.loses("host-1")
    job.stops("host-0")
    start = one(job.registers("host-1", pid=2), StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_a_job_that_waited_in_vain_gives_all_back() -> None:
    job = scheduled().running()
    job.loses("host-1")
    job.stops("host-0")
    assert job.waits(PATIENCE_S - 10) == ()
    requeue = one(job.waits(20), Requeue)
    assert (requeue.whole, requeue.exclude) == (True, ())


def in_vain(job: Job) -> float:
    """The seconds until all is given back; then the job is as short as it was."""
    begun = job.at
    while not (actions := job.waits(30)):
        assert job.at < begun + 1e6, "it is never given back"
    assert one(actions, Requeue).whole
    waited_s = job.at - begun
    assert job.allocation is not None
    job.allocation = replace(job.allocation, hosts=("host-0",))
    job.leads()
    job.registers("host-0")
    return waited_s


def test_each_time_all_was_given_back_in_vain_the_next_time_is_twice_as_far_off() -> None:
    """A job that no cluster has room for costs its hosts, and its journal, less and less."""
    job = scheduled().running()
    job.loses("host-1")
    job.stops("host-0")
    short_since, lines = job.run.stage.since, len(job.all)
    waits = [in_vain(job) for _ in range(9)]
    doubled = [PATIENCE_S * 2 ** min(times, MOST_DOUBLINGS) for times in range(9)]
    assert waits == pytest.approx(doubled, abs=35)
    assert (job.run.scheduler.given_back, job.run.scheduler.short_since) == (9, short_since)
    told = [event for event, _ in job.all[lines:] if not isinstance(event, Tick)]
    assert len(told) == 9 * 2, "a leader and its one agent each time"


def test_the_wait_is_short_again_once_an_attempt_has_begun() -> None:
    job = scheduled().running()
    job.loses("host-1")
    job.stops("host-0")
    in_vain(job)
    in_vain(job)
    one(job.registers("host-7"), StartAttempt)
    assert job.run.scheduler.given_back == 0
    job.trains()
    job.loses("host-7")
    job.stops("host-0")
    assert in_vain(job) == pytest.approx(PATIENCE_S, abs=35)


def test_or_goes_on_with_fewer() -> None:
    job = scheduled(shrink=True).running()
    job.loses("host-1")
    job.stops("host-0")
    assert job.waits(PATIENCE_S - 10) == ()
    assert one(job.waits(20), Replan).hosts == 1


def test_a_host_that_has_to_go_costs_no_budget_and_no_step() -> None:
    job = scheduled().running()
    stop = one(leaving(job, "host-1"), StopAttempt)
    assert stop.grace_s == 30.0, "time for a checkpoint"
    job.saves(7)
    assert job.stops() == ()
    assert job.loses("host-1") == (), "as was said; its successor is on its way"
    assert isinstance(job.run.stage, Waiting)
    start = one(job.registers("host-1", pid=2), StartAttempt)
    assert start.hosts == ("host-0", "host-1")
    assert (job.run.history.incidents, job.run.history.fruitless, job.run.history.restarts) == (
        (),
        0,
        0,
    )


def test_an_agent_that_goes_before_it_has_stopped_its_ranks_is_not_to_blame() -> None:
    job = scheduled().running()
    leaving(job, "host-1")
    job.loses("host-1")
    job.stops("host-0")
    assert (type(job.run.stage), job.run.history.incidents) == (Waiting, ())


EVICTED = "Evicted: the node was low on memory"


@pytest.mark.parametrize("with_errors", [False, True])
def test_a_host_that_was_taken_without_a_warning_costs_no_budget(with_errors: bool) -> None:
    """What its peers say of it then is no fault of theirs either."""
    job = scheduled().running()
    if with_errors:
        job.raises(0, "Connection closed by peer")
    job.loses("host-1", taken=EVICTED)
    job.stops("host-0")
    assert (type(job.run.stage), job.run.history.incidents) == (Waiting, ())
    assert job.run.stage.reason == f"the scheduler took host-1 ({EVICTED})"
    assert one(job.registers("host-7"), StartAttempt).hosts == ("host-0", "host-7")
    assert (job.run.history.fruitless, job.run.history.restarts) == (0, 0)


def test_an_error_from_before_a_host_was_taken_counts() -> None:
    job = scheduled().running()
    job.exits(0)
    job.waits(5)
    job.loses("host-1", taken=EVICTED)
    job.stops("host-0")
    (incident,) = job.run.history.incidents
    assert (incident.culprit.rank, job.run.history.restarts) == (0, 1)


def test_one_that_was_taken_and_is_back_before_its_silence_was_noticed_costs_nothing() -> None:
    job = scheduled().running()
    job.registers("host-1", pid=2, taken=EVICTED)
    job.stops("host-0")
    assert (job.run.history.incidents, job.run.history.fruitless, job.run.history.restarts) == (
        (),
        0,
        0,
    )
    assert (type(job.run.stage), job.run.attempt.number) == (Starting, 2)


def test_one_that_is_taken_while_the_job_waits_costs_nothing() -> None:
    job = scheduled()
    job.leads()
    job.registers("host-0")
    assert job.loses("host-0", taken=EVICTED) == ()
    assert job.run.history.fruitless == 0


def test_a_leader_that_was_taken_is_nobodys_fault() -> None:
    job = scheduled().running()
    job.leads(taken=EVICTED)
    assert (type(job.run.stage), job.run.history.incidents) == (Waiting, ())
    assert (job.run.history.fruitless, job.run.history.restarts) == (0, 0)


def test_a_spare_that_has_to_go_is_no_reason_to_stop() -> None:
    job = scheduled(spares=1).running()
    assert leaving(job, "host-2") == ()
    assert job.loses("host-2") == ()
    assert isinstance(job.run.stage, Running)


def test_a_spare_takes_over_at_once() -> None:
    job = scheduled(spares=1).running()
    leaving(job, "host-1")
    start = one(job.stops(), StartAttempt)
    assert start.hosts == ("host-0", "host-2")


def test_one_that_goes_while_the_job_waits_costs_nothing() -> None:
    job = scheduled()
    job.leads()
    job.registers("host-0")
    assert leaving(job, "host-0") == ()
    assert job.loses("host-0") == ()
    assert job.run.history.fruitless == 0


def test_said_twice_is_said_once() -> None:
    job = scheduled().running()
    leaving(job, "host-1")
    assert leaving(job, "host-1") == ()


def test_a_host_that_is_no_good_is_sent_away_once() -> None:
    job = scheduled()
    job.leads()
    job.registers("host-0")
    away = one(job.registers("host-1", findings=(BROKEN,)), ReplaceAgent)
    assert (away.host, away.elsewhere) == ("host-1", True)
    assert job.waits(10) == ()
    job.loses("host-1")
    start = one(job.registers("host-7"), StartAttempt)
    assert start.hosts == ("host-0", "host-7")


def comes_back(job: Job, host: str, pid: int) -> float:
    """How many seconds the host stays until it is replaced again."""
    assert job.loses(host) == ()
    assert job.registers(host, pid=pid, findings=(BROKEN,)) == ()
    came_at = job.at
    while not (asked := job.waits(1)):
        assert job.at < came_at + PATIENCE_S
    assert one(asked, ReplaceAgent).elsewhere
    return job.at - came_at


def test_to_wait_for_a_successor_is_not_written_down_each_second() -> None:
    job = scheduled().running()
    job.loses("host-1")
    job.stops("host-0")
    job.waits(40)
    waiting = job.run
    assert isinstance(waiting.stage, Waiting)
    assert job.waits(1) == ()
    assert job.run is waiting


def test_one_that_comes_back_is_sent_away_later_and_later_and_that_is_said() -> None:
    job = scheduled()
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
    start = one(job.registers("host-7"), StartAttempt)
    assert start.hosts == ("host-0", "host-7")
    assert job.run.hosts.away == {}
    assert job.run.history.fruitless == 0, "that it went each time was asked of it"


def test_nor_does_a_leader_that_comes_back_leave_at_once() -> None:
    job = scheduled()
    job.leads()
    one(job.registers("host-0", findings=(BROKEN,)), Requeue)
    job.leads()
    assert job.registers("host-0", pid=2, findings=(BROKEN,)) == ()
    assert "host-0 is not used" in job.run.stage.reason
    assert not one(job.waits(AGAIN_S), Requeue).whole


def test_a_leader_on_a_host_that_is_no_good_gives_that_back() -> None:
    job = scheduled()
    job.leads()
    requeue = one(job.registers("host-0", findings=(BROKEN,)), Requeue)
    assert (requeue.whole, requeue.exclude) == (False, ("host-0",))


def test_a_cordoned_host_is_left_at_a_checkpoint_and_another_asked_for() -> None:
    job = scheduled().running()
    one(flagged(job, "host-1"), StopAttempt)
    away = one(job.stops(), ReplaceAgent)
    assert (away.host, away.elsewhere, away.shut) == ("host-1", True, True)
    assert job.run.history.incidents == ()


def test_a_host_is_left_out_for_as_long_as_the_scheduler_holds_it() -> None:
    """Nodes are upgraded one after the other: the first is as good as new when the last is shut."""
    job = scheduled().running()
    flagged(job, "host-1")
    job.stops()
    job.loses("host-1")
    start = one(job.registers("host-7"), StartAttempt)
    assert start.hosts == ("host-0", "host-7")
    assert opened(job, "host-1") == ()
    assert (job.run.hosts.exclude, job.run.hosts.shut) == ({}, ())
    job.trains()
    job.waits(60)
    flagged(job, "host-7")
    assert one(job.stops(), ReplaceAgent).host == "host-7"
    job.loses("host-7")
    again = one(job.registers("host-1", pid=2), StartAttempt)
    assert again.hosts == ("host-0", "host-1")
    assert (job.run.history.incidents, job.run.history.fruitless) == ((), 0)


def test_a_host_that_is_opened_before_its_pod_has_gone_is_used_where_it_is() -> None:
    job = scheduled().running()
    flagged(job, "host-1")
    one(job.stops(), ReplaceAgent)
    start = one(opened(job, "host-1"), StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_nobody_is_asked_to_keep_pods_off_hosts_that_the_scheduler_shut() -> None:
    """It does that itself; what keeps them off by name would do so for the life of the job."""
    job = scheduled().running()
    flagged(job, "host-1")
    job.stops()
    job.loses("host-1")
    requeue = one(job.waits(PATIENCE_S + 10), Requeue)
    assert (requeue.whole, requeue.exclude) == (True, ())
    job.leads()
    assert (set(job.run.hosts.exclude), job.run.hosts.shut) == ({"host-1"}, ("host-1",))
    job.leads()
    assert job.run.hosts.shut == ("host-1",), (
        "nor does a leader that follows one that died forget it"
    )
    opened(job, "host-1")
    assert job.run.hosts.exclude == {}


def test_a_host_that_is_no_good_itself_stays_out_when_it_is_opened() -> None:
    job = scheduled()
    job.leads()
    flagged(job, "host-1")
    job.registers("host-0")
    away = one(job.registers("host-1", findings=(BROKEN,)), ReplaceAgent)
    assert (away.elsewhere, away.shut) == (True, False)
    opened(job, "host-1")
    assert job.run.hosts.by_name["host-1"].unfit
    assert one(job.registers("host-7"), StartAttempt).hosts == ("host-0", "host-7")


def test_a_cordoned_host_of_the_leader_is_given_back_alone() -> None:
    job = scheduled().running()
    one(flagged(job, "host-0"), StopAttempt)
    requeue = one(job.stops(), Requeue)
    assert (requeue.whole, requeue.exclude) == (False, ())
    job.leads()
    assert "host-0" in job.run.hosts.exclude, "also after its next leader has come"


def test_a_leader_that_has_to_go_leaves_the_others_where_they_are() -> None:
    job = scheduled().running()
    one(job.tell(LeaveAsked(at=job.now(), cause=None, words="SIGTERM")), StopAttempt)
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    requeue = one(job.stops(), Requeue)
    assert (requeue.whole, requeue.exclude) == (False, ())
    job.starts()
    assert (job.run.attempt.number, job.run.history.incidents, job.run.history.fruitless) == (
        2,
        (),
        0,
    )


def test_a_leader_that_has_to_go_before_an_attempt_goes_alone() -> None:
    job = scheduled()
    job.leads()
    job.tell(LeaveAsked(at=job.now(), cause=None, words="SIGTERM"))
    requeue = one(
        job.tell(LeaveAsked(at=job.now(), cause="drained", words="SIGTERM")),
        Requeue,
    )
    assert not requeue.whole


def test_a_drained_host_that_strikes_speak_against_stays_away_when_it_is_open() -> None:
    """The next leader knows of the strikes."""
    job = Job().granted(successor_s=300.0).running()
    flagged(job, "host-1")
    assert job.run.hosts.shut == ("host-1",)
    job.exclude = {"host-1": "2 strikes"}
    job.leads()
    assert not job.run.hosts.shut
    job.tell(HostOpened(at=job.now(), host="host-1"))
    assert job.run.hosts.exclude == {"host-1": "2 strikes"}

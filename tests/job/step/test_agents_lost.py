"""Agents are lost, come back or are replaced, in every stage."""

from collections.abc import Iterable

import pytest

from orchestrator.contract.messages.actions import EndJob, ReplaceAgent, StartAttempt, StopAttempt
from orchestrator.contract.messages.events import (
    AgentLost,
    HostFlagged,
    HostOpened,
    HostsChecked,
    HostStopped,
)
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.stage import Checking, Holding, Running, Starting, Stopping, Waiting
from orchestrator.job.state import pace_of
from tests.job.job_driver import Job, host


def test_an_agent_lost_in_training_is_replaced_on_the_same_host() -> None:
    job = Job().running()
    stop, order = job.loses("host-0", silent_s=2.5)
    reason = "the agent of host-0 is gone: it said nothing"
    assert stop == StopAttempt(attempt=1, grace_s=3.0, reason=reason)
    assert order == ReplaceAgent(host="host-0", reason=reason)
    assert job.loses("host-0") == (), "the loss is known already"
    assert job.stops("host-1") == (), "the job waits for the replacement"
    assert (type(job.run.stage), job.run.state) == (Waiting, "RECOVERING")
    (start,) = job.registers("host-0", pid=2)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")
    (incident,) = job.run.history.incidents
    assert (incident.kind, str(incident.culprit)) == ("host-lost", "host-0")
    assert incident.detected_after_s == 2.5


def test_a_spare_takes_the_place_of_a_lost_host() -> None:
    job = Job(spares=1).running()
    assert job.run.attempt.placement == ("host-0", "host-1")
    job.loses("host-0")
    (start,) = job.stops("host-1")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-2", "host-1")


def test_a_job_waits_for_its_planned_hosts_if_a_spare_registers_first() -> None:
    job = Job(spares=1)
    job.leads()
    assert job.registers("host-2") == ()
    assert job.registers("host-1") == (), "host-2 is only a spare, so host-0 is preferred"
    (start,) = job.registers("host-0")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_a_spare_is_used_if_a_planned_host_does_not_register_in_time() -> None:
    job = Job(spares=1)
    job.leads()
    job.registers("host-2")
    job.registers("host-1")
    assert job.waits(1) == ()
    (start,) = job.waits(5)
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-2", "host-1")


def test_a_lost_spare_is_replaced_while_training_continues() -> None:
    job = Job(spares=1).running()
    (order,) = job.loses("host-2")
    assert isinstance(order, ReplaceAgent)
    assert isinstance(job.run.stage, Running)


def test_a_spare_whose_replacement_never_registered_is_requested_again() -> None:
    job = Job(spares=1).running()
    job.loses("host-2")
    order, start = job.fails_once()
    assert isinstance(order, ReplaceAgent)
    assert (order.host, type(start)) == ("host-2", StartAttempt)


def test_an_agent_lost_after_its_ranks_finished_does_not_stop_the_job() -> None:
    job = Job().running()
    job.stops("host-0", finished=True)
    (order,) = job.loses("host-0")
    assert isinstance(order, ReplaceAgent)
    (end,) = job.stops("host-1", finished=True)
    assert isinstance(end, EndJob)
    assert end.state == "SUCCEEDED"


def test_losing_the_last_host_that_still_stops_ends_the_attempt() -> None:
    job = Job().running()
    job.exits(0)
    job.stops("host-0")
    (order,) = job.loses("host-1")
    assert isinstance(order, ReplaceAgent)
    assert isinstance(job.run.stage, Waiting)
    assert isinstance(job.registers("host-1", pid=2)[-1], StartAttempt)


def test_a_host_lost_after_its_ranks_stopped_is_replaced() -> None:
    job = Job().running()
    job.exits(0)
    job.stops("host-0")
    (order,) = job.loses("host-0")
    assert isinstance(order, ReplaceAgent)
    assert isinstance(job.run.stage, Stopping)
    assert job.stops("host-1")[0].reason.startswith("restart")


def test_agents_that_die_before_every_start_spend_the_budget() -> None:
    job = Job(max_restarts=2)
    job.leads()
    for pid in (1, 2, 3):
        assert job.run.ending is None
        job.registers("host-0", pid=pid)
        (order,) = job.loses("host-0")
        assert isinstance(order, ReplaceAgent)
        actions = job.waits(3)
    (end,) = actions
    assert isinstance(end, EndJob)
    assert end.reason == (
        "2 restarts without a new checkpoint, the most that max_restarts allows; last cause: the"
        " agent of host-0 is gone: it said nothing (rule max-restarts)"
    )
    last = job.run.history.incidents[-1]
    assert (last.kind, last.failure, last.rule) == ("host-lost", "host-lost", "max-restarts")
    assert (
        job.run.history.restarts,
        job.run.history.fruitless,
        len(job.run.history.incidents),
    ) == (2, 2, 3)


def loses_at_once(job: Job, numbers: Iterable[int]) -> None:
    for number in numbers:
        event = AgentLost(
            at=job.at + 0.01 * number, host=host(number), why="it broke", silent_s=2.0
        )
        assert isinstance(job.tell(event)[-1], ReplaceAgent)


def test_a_short_network_failure_before_the_first_start_is_no_incident() -> None:
    job = Job(hosts=32, max_restarts=5)
    job.leads()
    for number in range(20):
        job.registers(host(number))
    loses_at_once(job, range(8))
    for number in range(8):
        job.registers(host(number))
    assert job.run.interruption.findings is None
    job.waits(9)
    assert (type(job.run.stage), job.run.history.fruitless, job.run.history.incidents) == (
        Waiting,
        0,
        (),
    )


def test_hosts_lost_together_while_no_rank_runs_are_one_incident_without_culprit() -> None:
    job = Job(hosts=32, max_restarts=5)
    job.leads()
    for number in range(20):
        job.registers(host(number))
    loses_at_once(job, range(8))
    job.registers("host-1")
    assert job.waits(1) == (), "more hosts may be lost at the same time"
    job.waits(2)
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.rule) == ("hosts-lost", "transient-backoff")
    assert incident.culprit == NOBODY
    assert incident.cause.startswith("8 hosts were lost at once")
    assert (job.run.history.fruitless, job.run.history.restarts, job.run.interruption.findings) == (
        1,
        1,
        None,
    )
    for number in range(32):
        job.registers(host(number))
    assert isinstance(job.run.stage, Starting)


def test_the_wait_grows_each_time_the_network_fails_again() -> None:
    job = Job(hosts=32, max_restarts=5).starts()
    loses_at_once(job, range(16, 32))
    job.stops(*map(host, range(16)))
    waits_s: list[float] = []
    for pid in (2, 3, 4):
        for number in range(16, 28):
            job.registers(host(number), pid=pid)
        loses_at_once(job, range(16, 28))
        job.waits(4)
        assert isinstance(job.run.stage, Holding)
        assert job.run.stage.deadline is not None
        waits_s.append(job.run.stage.deadline - job.at)
        job.waits(waits_s[-1])
    assert waits_s == sorted(waits_s)
    assert waits_s[0] >= 7.5
    assert [i.kind for i in job.run.history.incidents] == ["hosts-lost"] * 4
    assert (job.run.history.fruitless, job.run.history.restarts, job.run.ending) == (4, 4, None)


def test_no_attempt_starts_before_a_lost_host_is_classified() -> None:
    job = Job(spares=2)
    job.leads()
    for name in job.all_hosts[:2]:
        job.registers(name)
    job.loses("host-0")
    assert job.registers("host-2") == ()
    assert job.waits(1) == ()
    (start,) = job.waits(3)
    assert isinstance(start, StartAttempt)
    assert [i.kind for i in job.run.history.incidents] == ["host-lost"]


def test_an_agent_lost_during_the_check_does_not_make_its_host_unfit() -> None:
    job = Job(hosts=3, spares=1, preflight=True).starts()
    assert isinstance(job.run.stage, Checking)
    assert job.run.stage.hosts == job.all_hosts
    job.loses("host-3")
    unfit = {"host-3": "it sent no report of the check of all hosts"}
    job.tell(HostsChecked(at=job.now(), check=job.run.hosts.checks, unfit=unfit))
    job.waits(3)
    assert [i.kind for i in job.run.history.incidents] == ["host-lost"]
    assert (job.run.hosts.by_name["host-3"].unfit, job.run.hosts.by_name["host-3"].checked) == (
        "",
        False,
    )
    assert isinstance(job.run.stage, Starting)


@pytest.mark.parametrize("pid", [1, 2])
def test_an_agent_back_before_the_check_ends_does_not_make_its_host_unfit(pid: int) -> None:
    """The missing report was due from this agent process (pid 1) or from its predecessor."""
    job = Job(hosts=3, spares=1, preflight=True).starts()
    job.loses("host-3")
    job.registers("host-3", pid=pid)
    unfit = {"host-3": "it sent no report of the check of all hosts"}
    job.tell(HostsChecked(at=job.now(), check=job.run.hosts.checks, unfit=unfit))
    job.waits(3)
    assert (job.run.hosts.by_name["host-3"].unfit, dict(job.run.hosts.exclude)) == ("", {})
    assert isinstance(job.run.stage, Checking)
    assert job.run.stage.hosts == job.all_hosts


def test_a_host_lost_while_no_rank_runs_loses_no_steps_and_is_no_failure_of_training() -> None:
    job = Job(max_restarts=9).running()
    job.saves(1)
    job.steps(50)
    job.loses("host-1")
    job.stops("host-0")
    job.loses("host-0")
    job.waits(4)
    assert [(i.kind, i.step, i.saved) for i in job.run.history.incidents] == [
        ("host-lost", 50, 1),
        ("host-lost", 50, None),
    ]
    assert pace_of(job.run).exposure.failures == 1


def test_the_loss_of_an_unknown_agent_is_ignored() -> None:
    job = Job().running()
    assert job.loses("host-9") == ()
    assert Job().loses("host-0") == ()


def test_a_new_agent_on_a_host_means_that_the_previous_agent_is_lost() -> None:
    job = Job(spares=1).running()
    (stop,) = job.registers("host-1", pid=2)
    assert isinstance(stop, StopAttempt)
    (start,) = job.stops("host-0")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")
    assert job.run.history.incidents[0].kind == "host-lost"


def test_a_new_agent_on_the_last_host_that_still_stops_starts_the_next_attempt() -> None:
    job = Job(spares=1).running()
    job.loses("host-2")
    job.exits(0)
    job.stops("host-0")
    order, start = job.registers("host-1", pid=2)
    assert isinstance(order, ReplaceAgent)
    assert order.host == "host-2", "host-1 has its new agent already"
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_registering_twice_changes_nothing() -> None:
    job = Job().running()
    before = job.run
    assert job.registers("host-0") == ()
    assert job.run is before


def test_a_new_agent_on_a_host_ends_a_job_whose_budget_is_spent() -> None:
    job = Job(max_restarts=0)
    job.leads()
    job.registers("host-0")
    job.registers("host-0", pid=2)
    (end,) = job.waits(3)
    assert isinstance(end, EndJob)


def test_an_agent_that_was_given_up_too_early_must_stop_its_ranks_before_its_host_is_used() -> None:
    job = Job(spares=1).running()
    job.loses("host-0")
    (stop,) = job.registers("host-0")
    assert isinstance(stop, StopAttempt)
    assert stop.attempt == 1
    assert job.stops("host-1") == (), "ranks of host-0 may still write"
    (start,) = job.stops("host-0")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_an_agent_back_after_its_attempt_stopped_must_stop_its_ranks_too() -> None:
    job = Job().running()
    job.loses("host-0")
    job.stops("host-1")
    assert isinstance(job.registers("host-0")[-1], StopAttempt)
    assert isinstance(job.run.stage, Waiting)
    assert isinstance(job.stops("host-0")[-1], StartAttempt)


def test_an_agent_that_comes_back_and_is_lost_again_is_replaced_again() -> None:
    job = Job().running()
    job.loses("host-0")
    job.registers("host-0")
    (order,) = job.loses("host-0")
    assert isinstance(order, ReplaceAgent)
    assert job.run.stage.reason.startswith("the agent of host-0 is gone")
    job.stops("host-1")
    assert isinstance(job.run.stage, Waiting)
    assert job.stops("host-0") == (), "its agent is lost"
    assert isinstance(job.registers("host-0", pid=2)[-1], StartAttempt)


def test_an_agent_that_comes_back_and_cannot_stop_is_lost_for_good() -> None:
    job = Job().running()
    job.loses("host-0")
    job.registers("host-0")
    job.stops("host-1")
    job.waits(30)
    assert isinstance(job.run.stage, Waiting)
    assert job.stops("host-0") == ()
    assert not job.run.hosts.by_name["host-0"].alive


def test_a_replacement_ends_the_wait_for_an_agent_that_came_back() -> None:
    job = Job().running()
    job.loses("host-0")
    job.registers("host-0")
    job.stops("host-1")
    assert isinstance(job.run.stage, Stopping)
    (start,) = job.registers("host-0", pid=2)
    assert isinstance(start, StartAttempt)
    assert job.run.hosts.by_name["host-0"].alive


def test_a_replacement_after_the_agent_came_back_spends_no_further_budget() -> None:
    job = Job().running()
    job.loses("host-0")
    job.stops("host-1")
    job.registers("host-0")
    assert isinstance(job.registers("host-0", pid=2)[-1], StartAttempt)
    assert job.run.history.fruitless == 1


def back_in_the_next_attempt() -> Job:
    """host-0 was lost in attempt 1; in attempt 2 its agent comes back with ranks of attempt 1."""
    job = Job(spares=1).running()
    job.loses("host-0")
    job.stops("host-1")
    assert (job.run.attempt.number, job.run.attempt.placement) == (2, ("host-2", "host-1"))
    job.trains()
    (stop,) = job.registers("host-0", running=1)
    assert isinstance(stop, StopAttempt)
    assert (stop.attempt, stop.hosts) == (1, ("host-0",))
    assert isinstance(job.run.stage, Running)
    return job


def test_a_host_with_ranks_of_an_old_attempt_gets_no_new_ranks_until_those_have_ended() -> None:
    job = back_in_the_next_attempt()
    job.loses("host-2")
    job.stops("host-1")
    assert isinstance(job.run.stage, Waiting), "host-0 still runs ranks of attempt 1"
    (start,) = job.tell(HostStopped(at=job.now(), attempt=1, host="host-0", finished=False))
    assert isinstance(start, StartAttempt)
    assert (start.attempt, start.hosts) == (3, ("host-0", "host-1"))


def test_a_host_whose_old_ranks_have_ended_is_a_spare() -> None:
    job = back_in_the_next_attempt()
    job.tell(HostStopped(at=job.now(), attempt=1, host="host-0", finished=False))
    assert isinstance(job.run.stage, Running), "the present attempt does not use host-0"
    assert job.run.hosts.by_name["host-0"].alive
    job.loses("host-2")
    assert isinstance(job.stops("host-1")[-1], StartAttempt)


def test_a_new_leader_waits_for_the_end_of_ranks_that_the_previous_one_started() -> None:
    job = Job().granted(successor_s=600.0).running()
    job.leads()
    (stop,) = job.registers("host-1", running=1)
    assert isinstance(stop, StopAttempt)
    assert (stop.attempt, stop.hosts) == (1, ("host-1",))
    assert job.registers("host-0", pid=2) == ()
    (start,) = job.tell(HostStopped(at=job.now(), attempt=1, host="host-1", finished=False))
    assert isinstance(start, StartAttempt)


def test_a_host_that_failed_while_it_was_drained_stays_excluded_when_it_is_opened() -> None:
    job = Job(spares=1).granted().running()
    job.raises(2, "CUDA error: uncorrectable ECC error encountered")
    job.tell(HostFlagged(at=job.now(), host="host-1", state="DRAINING", reason="a fan"))
    assert job.run.hosts.shut == ("host-1",)
    job.stops()
    assert not job.run.hosts.shut
    job.tell(HostOpened(at=job.now(), host="host-1"))
    assert "host-1" in job.run.hosts.exclude
    assert job.run.attempt.placement == ("host-0", "host-2")

"""A straggler (a slow rank) is recorded, and its host is replaced if the spec allows it."""

from typing import Any

import pytest

from orchestrator.contract.messages.actions import (
    Action,
    ReplaceAgent,
    Requeue,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import LeaveAsked, StragglerFound, StragglerGone
from orchestrator.job.hosts.straggler_replacement import strike_of
from orchestrator.job.stage import Running, Waiting
from tests.job.job_driver import Job, drills, error


def becomes_slow(job: Job, rank: int, own_s: float = 0.5) -> tuple[Action, ...]:
    found = StragglerFound(
        at=job.now(),
        attempt=job.run.attempt.number,
        rank=rank,
        host=job.run.attempt.placement[rank // 2],
        own_s=own_s,
        peers_s=0.1,
        step_s=1.0,
        steps=15,
        lost_tokens_per_second=6.0,
    )
    return job.tell(found)


def becomes_fast(job: Job, rank: int) -> tuple[Action, ...]:
    host = job.run.attempt.placement[rank // 2]
    gone = StragglerGone(
        at=job.now(), attempt=job.run.attempt.number, rank=rank, host=host, own_s=0.1, peers_s=0.1
    )
    return job.tell(gone)


def test_a_straggler_is_recorded_and_causes_no_action_by_default() -> None:
    job = Job(spares=1).running()
    assert becomes_slow(job, 3) == ()
    assert job.run.attempt.stragglers[3].host == "host-1"
    assert job.saves(7) == (), "resilience.replace_stragglers was not set"
    assert becomes_fast(job, 3) == ()
    assert job.run.attempt.stragglers == {}


def test_a_spare_replaces_the_host_of_a_straggler_after_the_next_checkpoint() -> None:
    job = Job(spares=1, replace_stragglers=True).running()
    assert becomes_slow(job, 3) == ()
    (stop,) = job.saves(7)
    assert isinstance(stop, StopAttempt)
    assert stop.grace_s == 30.0, "time for one more checkpoint"
    assert "rank 3 takes 0.500 s of its own a step, its peers 0.100 s" in stop.reason
    job.exits(0, exit_code=210, stopped=True)
    job.saves(8)
    job.stops("host-0")
    (start,) = job.stops("host-1")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert "host-1 keeps its peers waiting" in job.run.hosts.exclude["host-1"]
    assert (job.run.history.incidents, job.run.history.restarts, job.run.history.fruitless) == (
        (),
        0,
        0,
    ), "a replacement is no failure"
    assert job.run.attempt.stragglers == {}


def test_a_replaced_host_gets_one_strike_unless_a_drill_made_it_slow() -> None:
    for rank, by_drill in ((None, False), (3, True), (0, False)):
        armed = drills(f"slow:rank={rank or 0}@step=2")
        job = Job(spares=1, replace_stragglers=True, drills=armed).running()
        if rank is not None:
            job.drill(1)
        becomes_slow(job, 3)
        before = job.run
        job.saves(7)
        found = strike_of(before, job.run)
        if by_drill:
            assert found is None
            continue
        assert found is not None
        assert (found.host, found.kind, found.attempt) == ("host-1", "straggler", 1)
        assert "rank 3 takes 0.500 s of its own a step" in found.cause
        before = job.run
        job.saves(8)
        assert strike_of(before, job.run) is None, (
            "the checkpoint that ranks save when they stop adds no strike"
        )


def test_the_straggler_that_costs_most_is_replaced_first() -> None:
    job = Job(spares=1, replace_stragglers=True).running()
    becomes_slow(job, 3)
    becomes_slow(job, 0, own_s=0.9)
    job.saves(7)
    assert list(job.run.hosts.exclude) == ["host-0"]


def test_without_a_spare_a_straggler_is_not_replaced() -> None:
    job = Job(replace_stragglers=True).running()
    becomes_slow(job, 3)
    assert job.saves(7) == ()
    assert (type(job.run.stage), job.run.hosts.exclude) == (Running, {})
    scheduled = Job(replace_stragglers=True).granted().running()
    becomes_slow(scheduled, 3)
    assert not any(isinstance(action, Requeue) for action in scheduled.saves(7))


def test_a_straggler_on_a_pinned_host_is_not_replaced() -> None:
    job = Job(spares=1, replace_stragglers=True).granted()
    job.always = ("host-1",)
    job.running()
    becomes_slow(job, 3)
    assert job.saves(7) == ()


def test_the_next_leader_does_not_use_a_replaced_host() -> None:
    job = Job(spares=1, replace_stragglers=True).granted().running()
    becomes_slow(job, 3)
    job.saves(7)
    job.leads()
    assert list(job.run.hosts.exclude) == ["host-1"]


def test_a_straggler_that_is_fast_again_before_the_checkpoint_is_not_replaced() -> None:
    job = Job(spares=1, replace_stragglers=True).running()
    becomes_slow(job, 3)
    becomes_fast(job, 3)
    assert job.saves(7) == ()


@pytest.mark.parametrize("ends", ["cancelled", "hangs"])
def test_no_host_is_replaced_while_the_job_stops_for_another_reason(ends: str) -> None:
    job = Job(spares=1, replace_stragglers=True).running()
    becomes_slow(job, 3)
    getattr(job, ends)()
    assert job.saves(7) == ()
    assert job.run.hosts.exclude == {}


def test_a_new_attempt_begins_with_no_stragglers() -> None:
    job = Job().running()
    becomes_slow(job, 3)
    job.fails_once()
    assert (job.run.attempt.number, job.run.attempt.stragglers) == (2, {})


# Failures while the job stops to replace a straggler

ECC = "CUDA error: uncorrectable ECC error encountered"


def replacing_host_1(**more: Any) -> Job:
    """The job stops because it replaces host-1, the host of a straggler."""
    job = Job(spares=2, replace_stragglers=True, **more).granted().running()
    becomes_slow(job, 3)
    assert isinstance(job.saves(7)[0], StopAttempt)
    return job


@pytest.mark.parametrize("stopped", [False, True], ids=["before", "after"])
def test_a_hardware_failure_while_the_job_stops_is_an_incident_and_its_host_is_excluded(
    stopped: bool,
) -> None:
    """Before or after the agent of that host got the order to stop."""
    job = replacing_host_1()
    job.raises(0, ECC, stopped=stopped)
    job.exits(2, exit_code=210, stopped=True)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-2", "host-3")
    (incident,) = job.run.history.incidents
    assert (incident.failure, incident.culprit.host) == ("uncorrectable-ecc", "host-0")
    assert job.run.history.fruitless == 1, (
        "the failure spends the budget although the job was stopping"
    )
    assert sorted(job.run.hosts.replaced) == ["host-0", "host-1"], (
        "the host of the straggler is replaced too"
    )


def test_a_rank_that_fails_before_the_order_to_stop_is_an_incident() -> None:
    job = replacing_host_1()
    job.exits(0)
    job.stops()
    (incident,) = job.run.history.incidents
    assert (incident.failure, incident.culprit.rank) == ("sigkill-from-outside", 0)


@pytest.mark.parametrize(
    "how",
    [
        {"exit_code": 210},
        {"signal": 15},
        {"exit_code": 210, "stopped": True},
        {"signal": 9, "stopped": True},
        {"exit_code": 1, "error": error("Connection closed by peer"), "stopped": False},
        {"exit_code": 1, "error": error("DataLoader worker is killed"), "stopped": True},
    ],
    ids=["early", "by-torchrun", "as-ordered", "after-the-grace", "peer-left", "teardown"],
)
def test_a_rank_that_stops_as_ordered_is_no_incident(how: dict[str, Any]) -> None:
    """Ranks agree among themselves to stop, so some exit before their own agent has the order."""
    job = replacing_host_1()
    job.exits(0, **how)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    assert (job.run.history.incidents, job.run.history.fruitless) == ((), 0)


def test_an_agent_lost_while_the_job_stops_is_an_incident_and_replaced() -> None:
    job = Job(spares=1, replace_stragglers=True).granted().running()
    becomes_slow(job, 3)
    job.saves(7)
    assert [type(action) for action in job.loses("host-0")] == [ReplaceAgent]
    job.stops("host-1")
    assert [incident.kind for incident in job.run.history.incidents] == ["host-lost"]
    assert isinstance(job.run.stage, Waiting), "the job waits for the agent of host-0"
    starts = job.registers("host-0", pid=2)
    assert [a.hosts for a in starts if isinstance(a, StartAttempt)] == [("host-0", "host-2")]


def test_a_leader_that_dies_while_the_job_stops_is_an_incident() -> None:
    job = replacing_host_1()
    job.granted(restarts=1).leads()
    assert [incident.kind for incident in job.run.history.incidents] == ["leader-lost"]


def test_an_agent_whose_ranks_do_not_end_is_lost() -> None:
    job = replacing_host_1()
    job.stops("host-1")
    actions = job.waits(60.0)
    assert [incident.kind for incident in job.run.history.incidents] == ["host-lost"]
    assert [a.host for a in actions if isinstance(a, ReplaceAgent)] == ["host-0"]


def test_a_failure_after_a_request_to_leave_is_no_incident() -> None:
    job = Job().granted().running()
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    job.raises(0, ECC)
    (requeue,) = job.stops()
    assert isinstance(requeue, Requeue)
    assert (job.run.history.incidents, job.run.history.fruitless) == ((), 0)

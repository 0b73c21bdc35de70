"""What the supervisor makes of a rank that keeps its peers waiting."""

import pytest

from orchestrator.contract.actions import Action, Requeue, StartAttempt, StopAttempt
from orchestrator.contract.events import StragglerFound, StragglerGone
from orchestrator.supervise.replacing import strike_of
from orchestrator.supervise.state import Stage
from tests.supervise.supervise_stage import Job, drills


def slow(job: Job, rank: int, own_s: float = 0.5) -> tuple[Action, ...]:
    found = StragglerFound(
        at=job.now(),
        attempt=job.run.attempt,
        rank=rank,
        host=job.run.placement[rank // 2],
        own_s=own_s,
        peers_s=0.1,
        step_s=1.0,
        steps=15,
        lost_tokens_per_second=6.0,
    )
    return job.tell(found)


def fast(job: Job, rank: int) -> tuple[Action, ...]:
    host = job.run.placement[rank // 2]
    gone = StragglerGone(
        at=job.now(), attempt=job.run.attempt, rank=rank, host=host, own_s=0.1, peers_s=0.1
    )
    return job.tell(gone)


def test_a_straggler_is_known_while_it_is_one_and_nothing_is_done() -> None:
    job = Job(spares=1).running()
    assert slow(job, 3) == ()
    assert job.run.stragglers[3].host == "host-1"
    assert job.saves(7) == (), "resilience.replace_stragglers was not set"
    assert fast(job, 3) == ()
    assert job.run.stragglers == {}


def test_its_host_is_replaced_by_a_spare_after_the_next_checkpoint() -> None:
    job = Job(spares=1, replace_stragglers=True).running()
    assert slow(job, 3) == ()
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
    assert "host-1 keeps its peers waiting" in job.run.exclude["host-1"]
    assert (job.run.incidents, job.run.restarts, job.run.fruitless) == ((), 0, 0), "nobody's fault"
    assert job.run.stragglers == {}


def test_a_host_that_was_replaced_gets_a_strike_once_unless_it_was_rehearsed() -> None:
    for rehearsed in (False, True):
        job = Job(spares=1, replace_stragglers=True, drills=drills("slow:rank=3@step=2")).running()
        if rehearsed:
            job.drill(1)
        slow(job, 3)
        before = job.run
        job.saves(7)
        found = strike_of(before, job.run)
        if rehearsed:
            assert found is None
            continue
        assert found is not None
        assert (found.host, found.kind, found.attempt) == ("host-1", "straggler", 1)
        assert "rank 3 takes 0.500 s of its own a step" in found.cause
        before = job.run
        job.saves(8)
        assert strike_of(before, job.run) is None, "the last checkpoint on the way out"


def test_of_several_the_one_that_costs_most_goes_first() -> None:
    job = Job(spares=1, replace_stragglers=True).running()
    slow(job, 3)
    slow(job, 0, own_s=0.9)
    job.saves(7)
    assert list(job.run.exclude) == ["host-0"]


def test_without_a_spare_it_stays() -> None:
    job = Job(replace_stragglers=True).running()
    slow(job, 3)
    assert job.saves(7) == ()
    assert (job.run.stage, job.run.exclude) == (Stage.RUNNING, {})
    scheduled = Job(replace_stragglers=True).granted().running()
    slow(scheduled, 3)
    assert not any(isinstance(action, Requeue) for action in scheduled.saves(7))


def test_one_that_is_pinned_stays() -> None:
    job = Job(spares=1, replace_stragglers=True).granted()
    job.always = ("host-1",)
    job.running()
    slow(job, 3)
    assert job.saves(7) == ()


def test_the_next_leader_does_not_use_it_either() -> None:
    job = Job(spares=1, replace_stragglers=True).granted().running()
    slow(job, 3)
    job.saves(7)
    job.leads()
    assert list(job.run.exclude) == ["host-1"]


def test_one_that_keeps_up_again_before_the_checkpoint_stays() -> None:
    job = Job(spares=1, replace_stragglers=True).running()
    slow(job, 3)
    fast(job, 3)
    assert job.saves(7) == ()


@pytest.mark.parametrize("ends", ["cancelled", "hangs"])
def test_a_job_that_is_being_stopped_is_left_alone(ends: str) -> None:
    job = Job(spares=1, replace_stragglers=True).running()
    slow(job, 3)
    getattr(job, ends)()
    assert job.saves(7) == ()
    assert job.run.exclude == {}


def test_a_new_attempt_begins_with_no_stragglers() -> None:
    job = Job().running()
    slow(job, 3)
    job.fails_once()
    assert (job.run.attempt, job.run.stragglers) == (2, {})

"""A host that warns of its own failure is replaced by a spare before anything is lost."""

from typing import Any

import pytest

from orchestrator.contract.messages.actions import (
    Action,
    SaveCheckpoint,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import HostWarned, LeaveAsked, WarningKind
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.job.failures.policy import strike_weight
from orchestrator.job.hosts.warned_hosts import RECENT_S, REPLACE_EVERY_S, WAIT_S, outlook
from orchestrator.job.stage import Running, Waiting
from orchestrator.job.state import pace_of
from tests.job.job_driver import Job, drills, error

ECC = "GPU 0000:0f:00: uncorrected memory errors"


def a_job(hosts: int = 2, spares: int = 1, **more: Any) -> Job:
    return Job(hosts=hosts, spares=spares, replace_warned=True, **more)


def warns(
    job: Job, host: str, problem: WarningKind = "gpu-memory", what: str = ECC, lasts: bool = True
) -> tuple[Action, ...]:
    return job.tell(HostWarned(at=job.now(), host=host, problem=problem, what=what, lasts=lasts))


def stopped(actions: tuple[Action, ...]) -> StopAttempt:
    (stop,) = actions
    assert isinstance(stop, StopAttempt)
    return stop


def swapped(job: Job) -> StartAttempt:
    """The ranks of two hosts save step 8 and exit."""
    job.saves(8)
    (start,) = job.stops()
    assert isinstance(start, StartAttempt)
    return start


def test_a_spare_replaces_a_host_that_warns_and_no_step_is_lost() -> None:
    job = a_job().running()
    job.steps(7)
    stop = stopped(warns(job, "host-1"))
    assert (stop.grace_s, stop.keep_ranks) == (30.0, False), "time for one more checkpoint"
    assert stop.reason == f"host-1 warns: {ECC}"
    assert swapped(job).hosts == ("host-0", "host-2")
    job.trains(8)
    (incident,) = job.run.history.incidents
    assert (incident.kind, incident.failure, incident.scope) == (
        "host-warned",
        "host-warning",
        "host",
    )
    assert (incident.culprit.host, incident.culprit.rank) == ("host-1", None)
    assert (incident.remedy, incident.rule) == ("replace", "host-warning")
    assert incident.evidence.notes == (ECC,)
    assert incident.lost_steps == 0
    assert incident.recovered_after_s is not None
    assert (job.run.history.restarts, job.run.history.fruitless) == (0, 0)
    assert pace_of(job.run).exposure.failures == 0, "checkpoints are not needed more often"
    assert job.run.hosts.warned == ()


def test_steps_that_are_repeated_after_all_are_counted() -> None:
    job = a_job().running()
    job.steps(7)
    warns(job, "host-1")
    job.stops()
    job.trains(4)
    assert job.run.history.incidents[0].lost_steps == 3


def saves_at_once(actions: tuple[Action, ...]) -> bool:
    return [type(action) for action in actions] == [SaveCheckpoint]


def test_without_a_spare_a_checkpoint_is_saved_at_once_and_training_goes_on() -> None:
    job = a_job(spares=0).running()
    (save,) = warns(job, "host-1")
    assert save == SaveCheckpoint(attempt=1, reason=f"host-1 warns: {ECC}; no spare host is free")
    assert isinstance(job.run.stage, Running)
    assert [one.host for one in job.run.hosts.warned] == ["host-1"]
    said = outlook(job.run, job.run.hosts.warned[0], job.at)
    assert "no spare host is free" in said
    assert said.endswith(
        "The ranks save a checkpoint now; until then the newest checkpoint is of step 0"
    )
    assert job.waits(1.0) == (), "once for a warning"
    job.saves(3)
    said = outlook(job.run, job.run.hosts.warned[0], job.at)
    assert said.endswith("If it fails, the newest checkpoint is of step 3")
    assert job.waits(REPLACE_EVERY_S) == ()
    assert saves_at_once(warns(job, "host-0")), "that checkpoint is old by now"
    assert job.run.history.incidents == ()


def test_a_recent_checkpoint_is_enough() -> None:
    job = a_job(spares=0).running()
    job.saves(3)
    assert job.waits(RECENT_S - 5.0) == ()
    assert warns(job, "host-1") == ()
    assert job.waits(RECENT_S) == ()
    assert saves_at_once(warns(job, "host-0"))


def test_a_program_of_the_user_saves_when_it_wants_to() -> None:
    job = a_job(spares=0, run=RunSpec(script="train.py")).running()
    assert warns(job, "host-1") == ()
    said = outlook(job.run, job.run.hosts.warned[0], job.at)
    assert said.endswith("The program saves when it wants to; the newest checkpoint is of step 0")


def test_soon_after_a_stop_a_checkpoint_is_still_saved_for_a_host_without_a_spare() -> None:
    job = a_job().running()
    stopped(warns(job, "host-1"))
    swapped(job)
    job.trains(8)
    job.waits(RECENT_S)
    assert saves_at_once(warns(job, "host-0"))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"in_memory": True, "copies": 1}, True),
        ({"in_memory": True, "copies": 0}, False),
        ({}, False),
        ({"in_memory": True, "copies": 1, "run": RunSpec(script="train.py")}, False),
    ],
    ids=["partners", "own hosts alone", "disk alone", "a program of the user"],
)
def test_the_step_stays_in_memory_if_partners_have_copies(
    more: dict[str, Any], expected: bool
) -> None:
    job = a_job(**more).running()
    assert stopped(warns(job, "host-1")).in_memory is expected


def test_other_stops_write_the_disk() -> None:
    job = a_job(in_memory=True, copies=1).granted().running()
    preempted = job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    assert not stopped(preempted).in_memory, "the memory of its hosts is lost"
    assert not stopped(a_job(in_memory=True, copies=1).running().cancelled()).in_memory


def test_a_spare_that_comes_later_replaces_the_host() -> None:
    job = a_job()
    job.leads()
    job.registers("host-0")
    job.registers("host-1")
    job.waits(5.0)
    job.steps(1)
    assert saves_at_once(warns(job, "host-1"))
    assert job.waits(1.0) == ()
    job.registers("host-2")
    stopped(job.waits(1.0))


def test_a_warning_is_ignored_if_the_spec_says_so() -> None:
    job = Job(spares=1, replace_warned=False).running()
    assert warns(job, "host-1") == ()
    assert "replace_warned is false" in outlook(job.run, job.run.hosts.warned[0], job.at)


def test_a_rule_of_the_spec_may_keep_the_host() -> None:
    rule = PolicyRule(name="we-wait", classes=("host-warning",), action="restart")
    job = a_job(policy=(rule,)).running()
    assert warns(job, "host-1") == ()
    assert "rule we-wait says restart" in outlook(job.run, job.run.hosts.warned[0], job.at)


def test_a_pinned_host_stays() -> None:
    job = a_job().granted()
    job.always = ("host-1",)
    job.running()
    assert warns(job, "host-1") == ()
    assert "pinned" in outlook(job.run, job.run.hosts.warned[0], job.at)


def test_a_repeated_warning_changes_nothing() -> None:
    job = a_job(spares=0).running()
    warns(job, "host-1")
    before = job.run
    warns(job, "host-1")
    assert job.run is before
    warns(job, "host-1", lasts=False)
    assert job.run.hosts.warned == ()
    before = job.run
    warns(job, "host-1", lasts=False)
    assert job.run is before


@pytest.mark.parametrize("problem", WAIT_S)
def test_no_host_is_named_for_what_half_of_them_report(problem: WarningKind) -> None:
    job = a_job(hosts=4, spares=2).running()
    assert warns(job, "host-1", problem) == ()
    assert warns(job, "host-3", problem) == ()
    assert job.waits(WAIT_S[problem] + 1) == ()
    assert isinstance(job.run.stage, Running)
    assert "2 hosts report the same" in outlook(job.run, job.run.hosts.warned[0], job.at)
    count = len(job.run.history.incidents)
    assert count == 0
    warns(job, "host-3", problem, lasts=False)
    assert job.run.history.incidents[0].culprit.host == "host-1", "the other one has ended"


@pytest.mark.parametrize("problem", WAIT_S)
def test_what_half_of_them_reported_stays_shared_if_one_of_them_is_lost(
    problem: WarningKind,
) -> None:
    job = a_job(hosts=4, spares=1).running()
    warns(job, "host-1", problem)
    warns(job, "host-3", problem)
    job.loses("host-3")
    (start,) = job.stops("host-0", "host-1", "host-2")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1", "host-2", "host-4")
    job.trains(1)
    job.registers("host-5")
    assert job.waits(WAIT_S[problem] + 1) == ()
    assert "2 hosts report the same" in outlook(job.run, job.run.hosts.warned[0], job.at)


@pytest.mark.parametrize("problem", WAIT_S)
def test_what_all_reported_stays_shared_if_only_one_agent_lives_on_to_repeat_it(
    problem: WarningKind,
) -> None:
    job = a_job(hosts=4, spares=1).granted(successor_s=60.0).running()
    for number in (0, 1, 3):
        warns(job, f"host-{number}", problem)
    noticed = job.at
    job.granted(restarts=1, successor_s=60.0).leads()
    for number in range(5):
        job.registers(f"host-{number}")
    job.waits(30.0)
    again = HostWarned(
        at=noticed, host="host-3", problem=problem, what="again", age_s=job.at - noticed
    )
    job.tell(again)
    job.trains()
    assert job.waits(WAIT_S[problem] + 1) == ()
    assert "3 hosts report the same" in outlook(job.run, again, job.at)
    warns(job, "host-0", problem)
    warns(job, "host-0", problem, lasts=False)
    warns(job, "host-1", problem)
    stopped(warns(job, "host-1", problem, lasts=False))
    assert job.run.history.incidents[-1].culprit.host == "host-3", "the others have ended"


@pytest.mark.parametrize("problem", WAIT_S)
def test_what_others_may_report_too_counts_after_a_while(problem: WarningKind) -> None:
    job = a_job(hosts=4).running()
    assert warns(job, "host-1", problem) == ()
    assert "in a moment" in outlook(job.run, job.run.hosts.warned[0], job.at)
    assert job.waits(WAIT_S[problem] - 2) == ()
    stopped(job.waits(3.0))


def test_memory_errors_are_of_each_host_alone_and_stop_the_job_once_in_a_while() -> None:
    job = a_job(hosts=2, spares=2).running()
    stopped(warns(job, "host-1"))
    swapped(job)
    job.trains(8)
    assert warns(job, "host-0") == ()
    assert "does not stop more often" in outlook(job.run, job.run.hosts.warned[0], job.at)
    assert job.waits(REPLACE_EVERY_S - 60.0) == ()
    stopped(job.waits(60.0))
    assert [one.culprit.host for one in job.run.history.incidents] == ["host-1", "host-0"]


def test_as_many_hosts_are_replaced_as_there_are_spares() -> None:
    job = a_job(hosts=4, spares=1)
    job.leads()
    for number in range(4):
        job.registers(f"host-{number}")
    job.waits(5.0)
    job.steps(1)
    warns(job, "host-1")
    warns(job, "host-2")
    job.registers("host-4")
    stop = stopped(job.waits(1.0))
    assert "host-2" not in stop.reason, "there is one spare"


def test_a_spare_that_warns_replaces_nothing() -> None:
    job = a_job().running()
    assert warns(job, "host-2") == ()
    assert saves_at_once(warns(job, "host-1"))
    assert isinstance(job.run.stage, Running)


def test_a_restart_avoids_hosts_that_warn() -> None:
    job = Job(spares=1, replace_warned=False).running()
    warns(job, "host-1")
    (start,) = job.fails_once()
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-2")


def test_a_restart_uses_a_host_that_warns_if_there_is_no_other() -> None:
    job = a_job(spares=0).running()
    warns(job, "host-1")
    (start,) = job.fails_once()
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-1")


def test_a_failure_while_the_ranks_stop_is_an_incident_of_its_own() -> None:
    job = a_job().running()
    warns(job, "host-1")
    job.exits(0, error=error("boom"), exit_code=1)
    job.stops()
    assert [one.kind for one in job.run.history.incidents] == ["host-warned", "exception"]
    assert "host-1" in job.run.hosts.exclude


def test_nothing_is_replaced_while_the_job_leaves_or_ranks_do_not_train() -> None:
    job = a_job().granted().running()
    job.tell(LeaveAsked(at=job.now(), cause="preempted", words="SIGTERM"))
    assert warns(job, "host-1") == ()
    waits = a_job()
    waits.leads()
    waits.registers("host-1")
    assert warns(waits, "host-1") == ()
    assert isinstance(waits.run.stage, Waiting)


def test_the_next_leader_does_not_use_the_host() -> None:
    job = a_job().granted().running()
    warns(job, "host-1")
    job.leads()
    assert list(job.run.hosts.exclude) == ["host-1"]


def test_a_host_that_warned_gets_half_a_strike_and_none_for_a_drill() -> None:
    job = a_job().running()
    warns(job, "host-1")
    assert strike_weight(job.run.history.incidents[0]) == 0.5
    job = a_job(drills=drills("warn:host=1@step=2")).running()
    job.drill(1)
    warns(job, "host-1")
    (incident,) = job.run.history.incidents
    assert (incident.drill, strike_weight(incident)) == ("warn:host=1@step=2", 0.0)

"""A host whose agent alone had ended is no culprit."""

from typing import Any

import pytest

from orchestrator.contract.messages.events import AgentRegistered
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.incident import Incident
from orchestrator.job.reports.job_news import news_of
from orchestrator.leader.records.strike_writer import new_lines
from tests.job.job_driver import Job, drills

BOOT = "4f1c"
NEXT = AgentRegistered(at=0.0, host="host-0", address="::1", devices=2, pid=2, incarnation="2")


def job(spares: int = 0, **more: Any) -> Job:
    """A job that trains on hosts whose boot is known."""
    found = Job(spares=spares, **more)
    found.leads(boot=BOOT)
    for name in found.all_hosts:
        found.registers(name, boot=BOOT)
    found.trains()
    return found


def newest(job: Job) -> Incident:
    return job.run.history.incidents[-1]


def test_the_next_agent_in_the_same_boot_clears_its_host() -> None:
    killed = job()
    killed.loses("host-0", closed=True)
    killed.stops("host-1")
    assert (newest(killed).kind, newest(killed).culprit.host) == ("host-lost", "host-0")
    before = killed.run
    killed.registers("host-0", pid=2, boot=BOOT)
    found = newest(killed)
    assert (found.kind, found.failure, found.culprit) == ("agent-lost", "agent-lost", NOBODY)
    assert found.cause == (
        "the agent of host-0 is gone: it said nothing; host-0 works: its next agent started"
        " without a reboot"
    )
    assert "kernel log" in found.advice
    classes = [note for note in found.evidence.notes if note.startswith("class ")]
    assert classes == [f"class agent-lost (scope host): {found.advice}"]
    told, _ = news_of(before, NEXT, killed.run)
    assert (told.reason, told.warning) == ("Incident", False)
    assert told.text == "host-0 is cleared: its next agent started without a reboot"
    (line,) = new_lines(before, killed.run)
    assert (type(line).__name__, line.host) == ("Withdrawn", "host-0")
    assert new_lines(killed.run, killed.run) == []


@pytest.mark.parametrize(
    ("closed", "boot"),
    [
        pytest.param(False, BOOT, id="it fell silent: the host or its link may hang"),
        pytest.param(True, "90ab", id="it has booted since"),
        pytest.param(True, "", id="its boot is not known"),
    ],
)
def test_a_host_is_not_cleared_without_evidence(closed: bool, boot: str) -> None:
    lost = job()
    lost.loses("host-0", closed=closed)
    lost.stops("host-1")
    before = lost.run
    lost.registers("host-0", pid=2, boot=boot)
    assert (newest(lost).kind, newest(lost).culprit.host) == ("host-lost", "host-0")
    assert new_lines(before, lost.run) == []


@pytest.mark.parametrize("back_before", [False, True])
def test_a_host_whose_agent_a_signal_had_stopped_works(back_before: bool) -> None:
    """The agent is silent and its connection stays open, until the next agent finds it."""
    stopped = job()
    stopped.loses("host-0", closed=False)
    if not back_before:
        stopped.stops("host-1")
    stopped.registers("host-0", pid=2, boot=BOOT, former_stopped=True)
    if back_before:
        stopped.stops("host-1")
    found = newest(stopped)
    assert (found.kind, found.culprit) == ("agent-lost", NOBODY)
    assert "host-0 works: its next agent found the former one stopped by a signal" in found.cause


def test_a_stopped_agent_clears_no_host_whose_boot_is_not_known() -> None:
    stopped = job()
    stopped.loses("host-0", closed=False)
    stopped.stops("host-1")
    stopped.registers("host-0", pid=2, boot="", former_stopped=True)
    assert newest(stopped).culprit.host == "host-0"


def test_a_host_whose_place_a_spare_has_taken_is_cleared_when_it_returns() -> None:
    killed = job(spares=1)
    killed.loses("host-0", closed=True)
    killed.stops("host-1")
    killed.trains()
    assert newest(killed).culprit.host == "host-0"
    assert killed.run.attempt.placement == ("host-2", "host-1")
    killed.registers("host-0", pid=2, boot=BOOT)
    assert newest(killed).kind == "agent-lost"
    assert newest(killed).recovered_after_s is not None


def test_a_host_is_never_blamed_if_it_returns_before_the_verdict() -> None:
    killed = job()
    killed.loses("host-0", closed=True)
    killed.registers("host-0", pid=2, boot=BOOT)
    before = killed.run
    killed.stops("host-1")
    assert (newest(killed).kind, newest(killed).culprit) == ("agent-lost", NOBODY)
    assert new_lines(before, killed.run) == []


def test_a_rule_about_lost_hosts_does_not_decide_on_a_host_that_works() -> None:
    killed = job(spares=1)
    for pid in (2, 3):
        killed.loses("host-0", closed=pid == 3)
        killed.registers("host-0", pid=pid, boot=BOOT)
        killed.stops("host-1")
        killed.trains()
    first, second = killed.run.history.incidents
    assert (first.kind, second.kind) == ("host-lost", "agent-lost")
    assert second.remedy == "restart"
    assert not killed.run.hosts.exclude


def test_a_host_that_the_scheduler_took_is_no_incident_if_it_returns_at_once() -> None:
    taken = job(spares=1)
    taken.loses("host-0", closed=True, taken="preempted")
    taken.registers("host-0", pid=2, boot=BOOT)
    taken.stops("host-1")
    assert taken.run.history.incidents == ()


def test_a_host_whose_ranks_do_not_end_stays_the_culprit() -> None:
    """It was cleared of an earlier loss."""
    stuck = job()
    stuck.loses("host-0", closed=True)
    stuck.registers("host-0", pid=2, boot=BOOT)
    stuck.stops("host-1")
    stuck.trains()
    stuck.exits(2)
    stuck.waits(200)
    found = newest(stuck)
    assert (found.kind, found.culprit.rank) == ("rank-killed", 2)
    assert not any(host.works for host in stuck.run.hosts.by_name.values())


def test_an_agent_that_takes_the_place_of_another_one_clears_the_host() -> None:
    """The leader had not noticed the loss yet."""
    killed = job()
    killed.registers("host-0", pid=2, boot=BOOT)
    killed.stops("host-1")
    assert newest(killed).kind == "agent-lost"
    assert "another agent took its place" in newest(killed).cause


def test_only_the_incident_of_that_loss_is_cleared() -> None:
    twice = job()
    twice.loses("host-0")
    twice.stops("host-1")
    twice.registers("host-0", pid=2, boot=BOOT)
    twice.trains()
    twice.loses("host-0", closed=True)
    twice.stops("host-1")
    twice.registers("host-0", pid=3, boot=BOOT)
    first, second = twice.run.history.incidents
    assert (first.kind, first.culprit.host) == ("host-lost", "host-0")
    assert (second.kind, second.culprit) == ("agent-lost", NOBODY)
    assert not twice.run.hosts.exclude, "the second loss is no strike"


def test_the_loss_of_a_host_that_a_drill_rehearsed_stays_one() -> None:
    rehearsed = job(drills=drills("kill:host=0@step=5"))
    rehearsed.drill(1)
    rehearsed.loses("host-0", closed=True)
    rehearsed.stops("host-1")
    rehearsed.registers("host-0", pid=2, boot=BOOT)
    assert (newest(rehearsed).kind, newest(rehearsed).culprit.host) == ("host-lost", "host-0")


def test_a_failure_class_of_the_user_names_the_loss_of_an_agent() -> None:
    own = FailureRule(name="ops", scope="scheduler", action="restart", kinds=("agent-lost",))
    killed = job(failure_classes=(own,))
    killed.loses("host-0", closed=True)
    killed.stops("host-1")
    killed.registers("host-0", pid=2, boot=BOOT)
    assert (newest(killed).failure, newest(killed).scope) == ("ops", "scheduler")


@pytest.mark.parametrize(("boot", "culprit"), [(BOOT, None), ("90ab", "host-0"), ("", "host-0")])
def test_the_next_leader_of_a_replaced_pod_clears_its_host(boot: str, culprit: str | None) -> None:
    led = Job().granted(successor_s=300.0)
    led.leads(boot=BOOT)
    for name in led.all_hosts:
        led.registers(name, boot=BOOT)
    led.trains()
    led.leads(boot=boot)
    assert (newest(led).kind, newest(led).culprit.host) == ("leader-lost", culprit)


def test_a_later_allocation_clears_no_host() -> None:
    """The host may have been unreachable for hours."""
    led = Job().granted()
    led.leads(boot=BOOT)
    for name in led.all_hosts:
        led.registers(name, boot=BOOT)
    led.trains()
    led.granted(restarts=1).leads(boot=BOOT)
    assert (newest(led).kind, newest(led).culprit.host) == ("leader-lost", "host-0")

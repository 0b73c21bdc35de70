"""A job gets one event when the scheduler drains a host, and one when the host is open again."""

from msgspec.structs import replace

from orchestrator.contract.messages.events import HostFlagged, HostOpened
from orchestrator.job.hosts.scheduler_notices import (
    HURRY_S,
    NOTICES_S,
    asked_about,
    news,
    next_question_s,
)
from orchestrator.job.stage import Waiting
from orchestrator.job.state import with_host
from orchestrator.seams import HostNotice
from tests.job.job_driver import Job

CORDONED = HostNotice("host-1", "cordoned", "")


def test_a_cordon_gives_one_event_when_it_begins_and_one_when_it_ends() -> None:
    run = Job().granted(successor_s=300.0).running().run
    asked = asked_about(run)
    assert news(run, asked, (), (CORDONED,), 5.0) == (
        HostFlagged(at=5.0, host="host-1", state="cordoned", reason=""),
    )
    assert news(run, asked, {"host-1"}, (CORDONED,), 6.0) == ()
    shut = replace(run, hosts=replace(run.hosts, exclude={"host-1": "cordoned"}, shut=("host-1",)))
    assert news(shut, asked, {"host-1"}, (CORDONED,), 7.0) == ()
    assert news(shut, asked, {"host-1"}, (), 8.0) == (HostOpened(at=8.0, host="host-1"),)


def test_a_host_excluded_for_another_reason_gives_no_event() -> None:
    run = replace(
        Job().granted(successor_s=300.0).running().run,
        hosts=replace(
            Job().granted(successor_s=300.0).running().run.hosts, exclude={"host-1": "it is slow"}
        ),
    )
    assert news(run, asked_about(run), (), (CORDONED,), 5.0) == ()
    assert news(run, asked_about(run), {"host-1"}, (), 6.0) == ()


def test_the_scheduler_is_asked_about_excluded_hosts_until_they_are_open() -> None:
    run = Job().granted(successor_s=300.0).running().run
    gone = replace(run, hosts=replace(run.hosts, exclude={"host-9": "cordoned"}, shut=("host-9",)))
    assert asked_about(run) == ("host-0", "host-1")
    assert asked_about(gone) == ("host-0", "host-1", "host-9")
    assert news(gone, ("host-0",), (), (), 5.0) == (), "the scheduler was not asked about host-9"


def test_the_scheduler_is_asked_more_often_while_the_job_waits_for_a_lost_agent() -> None:
    job = Job().granted().running()
    assert next_question_s(job.run) == NOTICES_S
    gone = replace(job.run.hosts.by_name["host-1"], alive=False)
    lost = with_host(job.run, gone)
    assert next_question_s(lost) == NOTICES_S, "a lost spare is not urgent"
    waiting = replace(lost, stage=Waiting(since=0.0, reason="", deadline=0.0))
    assert next_question_s(waiting) == HURRY_S
    assert (
        next_question_s(
            replace(waiting, hosts=replace(waiting.hosts, exclude={"host-1": "it is slow"}))
        )
        == NOTICES_S
    )
    with_successors = Job().granted(successor_s=300.0).running().run
    assert (
        next_question_s(replace(with_successors, hosts=waiting.hosts, stage=waiting.stage)) == 15.0
    )

"""The job does not wait for a host on which no agent can start, and names it at once."""

from msgspec.structs import replace

from orchestrator.contract.messages.actions import Action, EndJob, Requeue, StartAttempt
from orchestrator.contract.messages.events import HostUnavailable
from orchestrator.job.hosts.scheduler_notices import NOTICES_S, UNHEARD_S, next_question_s, unheard
from orchestrator.job.leader_change import SETTLE_S
from orchestrator.job.stage import Running
from tests.job.job_driver import Job

WHY = "slurmstepd: error: execve(): /shared/python: No such file or directory"


def cannot_start(job: Job, host: str) -> tuple[Action, ...]:
    return job.tell(HostUnavailable(at=job.now(), host=host, why=WHY))


def test_without_a_spare_the_requeue_excludes_only_that_host() -> None:
    job = Job(hosts=3).granted()
    job.leads()
    job.registers("host-0")
    assert cannot_start(job, "host-2") == ()
    (requeue,) = job.waits(10)
    assert isinstance(requeue, Requeue)
    assert requeue.exclude == ("host-2",), "not host-1, whose agent may still register"
    (incident,) = job.run.history.incidents
    assert incident.cause == f"no agent can start on host-2: {WHY}"
    assert (incident.kind, incident.culprit.host) == ("preflight", "host-2")
    assert "mounts of host-2" in incident.advice
    assert job.run.hosts.exclude == {"host-2": WHY}


def test_with_a_spare_the_job_starts_without_that_host() -> None:
    job = Job(spares=1).granted()
    job.leads()
    job.registers("host-0")
    cannot_start(job, "host-1")
    (start,) = job.registers("host-2")
    assert isinstance(start, StartAttempt)
    assert start.hosts == ("host-0", "host-2")
    assert len(job.run.history.incidents) == 1
    job.trains()
    assert job.fails_once() != ()
    assert [one.kind for one in job.run.history.incidents] == ["preflight", "rank-killed"], (
        "the host is reported once"
    )


def test_a_spare_that_cannot_be_used_is_named_while_ranks_run() -> None:
    job = Job(spares=1).granted()
    job.leads()
    job.registers("host-0")
    job.registers("host-2")
    job.waits(SETTLE_S)
    job.trains()
    assert unheard(job.run) == ("host-1",)
    assert next_question_s(job.run) == NOTICES_S, "there is no hurry"
    assert cannot_start(job, "host-1") == (), "the job trains on"
    (incident,) = job.run.history.incidents
    assert incident.cause == f"no agent can start on host-1: {WHY}"
    assert incident.recovered_after_s == 0.0
    assert unheard(job.run) == ()
    assert job.fails_once() != ()
    assert len(job.run.history.incidents) == 2, "the host is reported once"


def test_if_agents_cannot_start_on_most_hosts_the_job_ends_without_culprit() -> None:
    job = Job(hosts=4).granted()
    job.leads()
    job.registers("host-0")
    for number in (1, 2, 3):
        assert cannot_start(job, f"host-{number}") == ()
    (end,) = job.waits(10)
    assert isinstance(end, EndJob)
    assert end.state == "FAILED"
    assert end.reason.startswith(
        f"no agent can start on 3 of 4 hosts, too many to exclude them; on host-1: {WHY}; fix: "
    )
    assert job.run.history.incidents == ()


def test_an_agent_that_registers_after_all_is_used() -> None:
    job = Job(hosts=4).granted()
    job.leads()
    cannot_start(job, "host-1")
    for name in ("host-1", "host-0", "host-2", "host-3"):
        actions = job.registers(name)
    (start,) = actions
    assert isinstance(start, StartAttempt)
    assert job.run.history.incidents == ()


def test_a_host_outside_the_allocation_is_ignored() -> None:
    job = Job().granted()
    job.leads()
    assert cannot_start(job, "elsewhere") == ()
    assert job.run.hosts.by_name == {}


def test_the_scheduler_is_asked_sooner_about_hosts_without_an_agent() -> None:
    job = Job().granted()
    job.leads()
    job.registers("host-0")
    assert unheard(job.run) == ("host-1",)
    assert next_question_s(job.run) == UNHEARD_S < SETTLE_S
    job.registers("host-1")
    assert unheard(job.run) == ()
    assert next_question_s(job.run) == NOTICES_S
    pods = Job().granted(successor_s=600.0)
    pods.leads()
    assert unheard(pods.run) == ()
    assert unheard(replace(job.run, stage=Running(since=0.0, reason=""))) == ()

"""The leader is lost or seems lost: another agent takes over within the allocation.

No healthy host becomes a culprit or is excluded.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import wait_for
from tests.slurm.e2e.two_node_job import TESTBED_KNOBS, Job, fill_disk, job_on, uninterrupted
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = {"train.steps": "48"}
SAVES = {**STEPS, "checkpoint.every_steps": "4"}


@contextlib.contextmanager
def cluster(**knobs: str) -> Iterator[SlurmTestbed]:
    """Three nodes below one switch; a job may get any two of them."""
    with running_testbed(
        nodes=3, gpus=1, knobs={**TESTBED_KNOBS, "TB_LEAF": "4", **knobs}
    ) as testbed:
        yield testbed


@pytest.fixture(params=["2", "30"], ids=lambda seconds: f"KillWait {seconds}")
def job_on_fast_or_slow_kill(
    slurm_available: None, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Job]:
    """A job on a cluster with a short kill wait, and on one with Slurm's default."""
    with cluster(TB_KILL_WAIT=request.param) as testbed, job_on(testbed, tmp_path / "runs") as job:
        yield job


@pytest.fixture
def job(slurm_available: None, tmp_path: Path) -> Iterator[Job]:
    with cluster() as testbed, job_on(testbed, tmp_path / "runs") as job:
        yield job


def agent_of(job: Job, host: str) -> int:
    """Process id of the host's agent, read from its lock file."""
    return int((job.run_dir / "logs" / f"agent-{host}.lock").read_text())


def leader_of(job: Job) -> str:
    host: str = job.events("LeaderStarted")[-1]["host"]
    return host


def has_ended_or_is_released(job: Job, host: str) -> bool:
    """Slurm may start the job on `host` before its slurmd has ended the old processes. Then it
    drains the host and holds the job, and `ndctl status` asks for what is done here."""
    (job_id,) = job.ids()
    if "held" in job.slurm.output_of("squeue", "-h", "-j", job_id, "-o", "%r"):
        job.slurm.output_of("scontrol", "update", f"NodeName={host}", "State=RESUME")
        job.slurm.output_of("scontrol", "release", job_id)
    return job.has_ended()


def submit_and_train(job: Job, **options: str) -> tuple[str, list[str]]:
    """Submits a job and waits until it has saved; returns the leader's host and the other hosts."""
    job.submit_successfully(**{**SAVES, **options})
    job.wait_for_step(6)
    job.wait_until("a checkpoint", lambda: job.events("CheckpointSaved"))
    hosts = job.events("LeaderStarted")[0]["allocation"]["hosts"]
    leader = leader_of(job)
    return leader, [host for host in hosts if host != leader]


def agent_logs(job: Job) -> str:
    return "\n".join(path.read_text() for path in (job.run_dir / "logs").glob("agent-*.log"))


def assert_taken_over(job: Job, leaders: list[str]) -> None:
    """The job ended in its allocation, and these hosts were its leaders in this order."""
    job.wait_for_end(limit=600)
    assert job.losses() == uninterrupted(**STEPS)
    assert [one["host"] for one in job.events("LeaderStarted")] == leaders
    assert {one["allocation"]["restarts"] for one in job.events("LeaderStarted")} == {0}
    assert not job.actions_of_kind("Requeue")
    shown = job.slurm_job()
    assert (shown["Restarts"], shown["ExcNodeList"]) == ("0", "(null)")
    assert "job is queued again" not in agent_logs(job)


def assert_lost_leader(job: Job, incident: dict[str, object], how: str) -> None:
    """The incident blames no host, and its figures agree with the metrics and with the checkpoint
    that the job resumed from."""
    culprit = incident["culprit"]
    assert isinstance(culprit, dict)
    assert (incident["kind"], culprit["host"]) == ("leader-lost", None)
    assert json.loads(job("hosts", "--json").out)["hosts"] == []
    assert how in str(incident["cause"])
    done = max(one["step"] for one in job.metrics() if one["attempt"] == 1)
    resumed = next(one for one in job.events("TrainingResumed") if one["attempt"] == 2)
    assert incident["step"] == done
    assert incident["saved"] == resumed["step"] > 0
    output = job("describe", "e2e").out
    many = done - resumed["step"]
    assert f"{many} {'step' if many == 1 else 'steps'} of work lost" in output, output


def test_the_leaders_agent_is_killed_on_a_healthy_node(job_on_fast_or_slow_kill: Job) -> None:
    job = job_on_fast_or_slow_kill
    leader, (other,) = submit_and_train(job)
    os.kill(agent_of(job, leader), signal.SIGKILL)
    assert_taken_over(job, [leader, other])
    (incident,) = job.status()["incidents"]
    assert_lost_leader(job, incident, f"its process on {leader} had exited")
    assert sorted(job.actions_of_kind("StartAttempt")[1]["hosts"]) == sorted([leader, other])
    assert job.slurm_job()["JobState"] == "COMPLETED"


def test_a_stopped_leader_is_ended_before_another_leads(job: Job) -> None:
    """A stopped leader would keep the journal locked, and its ranks could continue if it wakes."""
    leader, (other,) = submit_and_train(job)
    stopped = agent_of(job, leader)
    os.kill(stopped, signal.SIGSTOP)
    job.wait_until("another leader", lambda: leader_of(job) == other)
    assert not Path(f"/proc/{stopped}").exists()
    assert_taken_over(job, [leader, other])
    (incident,) = job.status()["incidents"]
    how = f"its process {stopped} on {leader} still existed (stopped by a signal)"
    assert_lost_leader(job, incident, how)


def test_a_leader_that_wakes_after_a_takeover_leaves_and_writes_nothing(job: Job) -> None:
    """The leader is stopped on a disconnected node, where no process can end it. It keeps the
    journal locked, so the job is requeued without that node."""
    leader, _ = submit_and_train(job, **{"cluster.spare_hosts": "1"})
    stopped = agent_of(job, leader)
    os.kill(stopped, signal.SIGSTOP)
    job.slurm.net_down(leader)
    job.wait_until("the fence to name another leader", lambda: "takes over" in agent_logs(job))
    lines = len(job.journal())
    os.kill(stopped, signal.SIGCONT)
    log = job.run_dir / "logs" / f"agent-{leader}.log"
    wait_for(
        lambda: "exiting: another leader has taken over" in log.read_text(),
        "the agent to exit",
        120,
    )
    assert not [one for one in job.journal()[lines:] if one.get("host") == leader]
    job.slurm.net_up(leader)
    wait_for(lambda: has_ended_or_is_released(job, leader), "the end of the job", 900)
    job.wait_for_end()
    assert job.losses() == uninterrupted(**STEPS)
    again = job.events("LeaderStarted")[1]
    assert again["host"] != leader
    (incident,) = job.status()["incidents"]
    assert (incident["kind"], incident["culprit"]["host"]) == ("leader-lost", leader)
    assert_attempts_do_not_mix(job)


def test_a_leader_that_took_over_can_be_replaced_in_turn(job: Job) -> None:
    """The second leader had started a new agent on the first leader's node; that agent ends with
    it, and a third leader starts an agent there again."""
    leader, others = submit_and_train(job, **{"cluster.spare_hosts": "1"})
    os.kill(agent_of(job, leader), signal.SIGKILL)
    job.wait_for_step(12, attempt=2)
    second = leader_of(job)
    assert second in others
    os.kill(agent_of(job, second), signal.SIGKILL)
    (third,) = {*others} - {second}
    assert_taken_over(job, [leader, second, third])
    kinds = [(one["kind"], one["culprit"]["host"]) for one in job.status()["incidents"]]
    assert kinds[:2] == [("leader-lost", None)] * 2


def test_a_spare_takes_the_place_of_the_leaders_node(job: Job) -> None:
    """The batch script is lost with the node. The new leader cancels the Slurm job at the end,
    because otherwise its nodes would stay allocated until the time limit."""
    leader, others = submit_and_train(job, **{"cluster.spare_hosts": "1"})
    job.slurm.kill_node(leader)
    job.wait_for_step(12, attempt=2)
    job.slurm.start_node(leader)
    job.wait_for_end(limit=600)
    assert job.losses() == uninterrupted(**STEPS)
    assert sorted(job.actions_of_kind("StartAttempt")[1]["hosts"]) == sorted(others)
    (incident,) = job.status()["incidents"]
    assert (incident["kind"], incident["culprit"]["host"]) == ("leader-lost", leader)
    assert not job.actions_of_kind("Requeue")
    assert (job.slurm_job()["JobState"], job.slurm_job()["Restarts"]) == ("CANCELLED", "0")
    assert job.status()["state"] == "SUCCEEDED"


# No other host becomes a culprit


@pytest.mark.parametrize("gives_up_s", ["5", "300"])
def test_the_network_of_the_leaders_node_is_cut_for_a_while(
    slurm_available: None, tmp_path: Path, gives_up_s: str
) -> None:
    """Slurm sets the node down meanwhile or does not notice; its healthy peer is no culprit."""
    with (
        cluster(TB_SLURMD_TIMEOUT=gives_up_s) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        if not testbed.has_network:
            pytest.skip("nodes have no networks of their own here")
        leader, (other,) = submit_and_train(job)
        since = job.num_steps()
        testbed.net_down(leader)
        wait_real_time(25.0)
        testbed.net_up(leader)
        job.wait_until(
            "steps of the next attempt",
            lambda: any(step["attempt"] > 1 for step in job.metrics()[since:]),
        )
        job.wait_for_end(limit=600)

        assert job.losses() == uninterrupted(**STEPS)
        assert other not in culprit_hosts(job)
        assert not [one for one in job.events("HostUnavailable") if one["host"] == other]
        assert other not in job.slurm_job()["ExcNodeList"]
        strikes = json.loads(job("hosts", "--json").out)["hosts"]
        assert other not in {one["host"] for one in strikes}
        if gives_up_s == "300":
            assert not job.actions_of_kind("Requeue"), "the allocation was not released"
            assert job.slurm_job()["Restarts"] == "0"


def test_a_node_whose_slurmd_is_dead_is_left_without_a_lost_step(job: Job) -> None:
    """Its agent and its ranks are well, so they save before the job leaves the node."""
    leader, (other,) = submit_and_train(job, **{"train.steps": "400"})
    pid = job.slurm.folder / "run" / f"slurmd-{other}.pid"
    os.kill(int(pid.read_text()), signal.SIGKILL)
    job.wait_until("the next run", lambda: len(job.events("LeaderStarted")) == 2, 600)
    log = (job.run_dir / "logs" / f"agent-{other}.log").read_text
    wait_for(lambda: f"leaving: {other} is DOWN" in log(), "the agent to exit", 120)
    (requeue,) = job.actions_of_kind("Requeue")
    assert requeue["exclude"] == [other]
    assert leader in job.events("LeaderStarted")[1]["allocation"]["hosts"]
    job.wait_for_step(job.last_step() + 2, attempt=2)
    done = max(one["step"] for one in job.metrics() if one["attempt"] == 1)
    resumed = next(one for one in job.events("TrainingResumed") if one["attempt"] == 2)
    assert resumed["step"] == done
    assert job.status()["incidents"] == []
    assert job("cancel", "e2e").code == 0


# A takeover meets another fault


def test_a_takeover_waits_until_the_disk_has_room(slurm_available: None, small_disk: Path) -> None:
    with cluster() as testbed, job_on(testbed, small_disk / "runs") as job:
        leader, (other,) = submit_and_train(job)
        former = json.loads((job.run_dir / "fence.json").read_text())
        filler = fill_disk(small_disk)
        os.kill(agent_of(job, leader), signal.SIGKILL)
        wait_real_time(20.0)  # A failed takeover cannot be seen in a log, because the disk is full.
        assert len(job.events("LeaderStarted")) == 1
        assert json.loads((job.run_dir / "fence.json").read_text()) == former
        filler.unlink()
        assert_taken_over(job, [leader, other])
        (incident,) = job.status()["incidents"]
        assert (incident["kind"], incident["culprit"]["host"]) == ("leader-lost", None)


def wait_real_time(seconds: float) -> None:
    """Waits in real time while a fault lasts."""
    begun = time.monotonic()
    wait_for(lambda: time.monotonic() - begun >= seconds, "time to pass", seconds + 60)


def culprit_hosts(job: Job) -> set[str | None]:
    return {one["culprit"]["host"] for one in job.status()["incidents"]}


def assert_attempts_do_not_mix(job: Job) -> None:
    """No process of an ended attempt writes anything."""
    attempts = [one["attempt"] for one in job.metrics()]
    assert attempts == sorted(attempts)
    assert not list((job.run_dir / "checkpoints").glob("*.partial-*"))

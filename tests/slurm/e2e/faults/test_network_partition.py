"""A node is disconnected from the others, keeps running for a while, and reconnects."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import processes_of, wait_for
from tests.slurm.e2e.two_node_job import TESTBED_KNOBS, Job, job_on, uninterrupted
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

SAVES = {"checkpoint.every_steps": "4"}


@pytest.fixture
def cluster(slurm_available: None) -> Iterator[SlurmTestbed]:
    with running_testbed(nodes=3, gpus=1, knobs={**TESTBED_KNOBS, "TB_LEAF": "4"}) as testbed:
        if not testbed.has_network:
            pytest.skip("nodes have no networks of their own here")
        yield testbed


@pytest.fixture
def job(cluster: SlurmTestbed, tmp_path: Path) -> Iterator[Job]:
    with job_on(cluster, tmp_path / "runs") as job:
        yield job


def assert_attempts_do_not_mix(job: Job) -> None:
    """No process of an ended attempt writes anything."""
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    attempts = [json.loads(line)["attempt"] for line in lines]
    assert attempts == sorted(attempts)
    assert attempts[-1] == 2
    checkpoint_attempts = [event["attempt"] for event in job.events("CheckpointSaved")]
    assert checkpoint_attempts == sorted(checkpoint_attempts)
    assert not list((job.run_dir / "checkpoints").glob("*.partial-*"))


def processes_on(job: Job, node: str) -> dict[int, str]:
    """Pid to command line of the job's processes on a node."""
    found = {}
    for pid, command in processes_of(job.run_dir).items():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"SLURMD_NODENAME={node}".encode() in environ:
            found[pid] = command
    return found


def test_a_spare_replaces_a_follower_that_is_cut_off(job: Job) -> None:
    job.submit_successfully(**SAVES, **{"cluster.spare_hosts": "1"})
    job.wait_for_step(6)
    leader, lost = job.actions_of_kind("StartAttempt")[0]["hosts"]
    assert leader == job.events("LeaderStarted")[0]["host"]
    assert processes_on(job, lost)
    job.slurm.net_down(lost)
    job.wait_for_step(8, attempt=2)
    wait_for(lambda: not processes_on(job, lost), "the node to end its ranks by itself", 60)
    job.slurm.net_up(lost)
    job.wait_for_end()

    assert job.losses() == uninterrupted()
    (incident,) = job.status()["incidents"]
    assert (incident["kind"], incident["culprit"]["host"]) == ("host-lost", lost)
    assert lost not in job.actions_of_kind("StartAttempt")[1]["hosts"]
    assert len(job.events("LeaderStarted")) == 1, "the job was not requeued"
    assert_attempts_do_not_mix(job)


def test_a_leader_that_was_cut_off_is_fenced_when_it_returns(job: Job) -> None:
    job.submit_successfully(**SAVES)
    job.wait_for_step(6)
    lost = job.events("LeaderStarted")[0]["host"]
    job.slurm.net_down(lost)
    job.wait_until("a new leader", lambda: len(job.events("LeaderStarted")) == 2)
    taken_over = len(job.journal())
    job.wait_for_step(8, attempt=2)
    job.slurm.net_up(lost)
    job.wait_for_end()

    assert job.losses() == uninterrupted()
    again = job.events("LeaderStarted")[1]
    assert again["host"] != lost
    assert lost not in again["allocation"]["hosts"], "the bad node was excluded"
    assert again["allocation"]["restarts"] == 1
    later = job.journal()[taken_over:]
    assert lost not in {event.get("host") for event in later}
    assert not [event for event in later if event.get("attempt") == 1]
    (incident,) = job.status()["incidents"]
    assert (incident["kind"], incident["culprit"]["host"]) == ("leader-lost", lost)
    assert_attempts_do_not_mix(job)

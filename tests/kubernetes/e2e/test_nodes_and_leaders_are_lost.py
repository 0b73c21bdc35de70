"""Real ranks on nodes that are lost, under a leader whose pod and node are lost as well."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import processes_of
from tests.kubernetes.e2e.outside import Person, rights
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.timeout(900)]
STEPS = 400
TRAINS = {
    "train.steps": str(STEPS),
    "checkpoint.every_steps": "20",
    "force_delete_after": "5",
    "cpu": "100m",
}
"""Enough for several faults in a row, on a machine that is busy as well."""


@pytest.fixture
def job(kube: KubeTestbed, tmp_path: Path) -> Iterator[Person]:
    rights(kube)
    person = Person(tmp_path / "runs", kube, trains=True)
    yield person
    if processes_of(person.run_dir):
        person("cancel", "e2e", "--backend=kubernetes")


def test_a_lost_node_then_the_leaders_node(job: Person) -> None:
    """Also: the API server restarts meanwhile."""
    job.submitted(**TRAINS)
    job.wait_until(step=25)
    pods = job.nodes()
    (leader,) = job.leaders()
    (follower,) = set(pods) - {leader}
    uids = job.uids()
    job.kube.lose_node(follower)
    job.wait_until_attempt(2)
    assert job.leaders() == [leader], "the leader's pod waited in place"
    again = job.uids()
    assert again["e2e-master-0"] == uids["e2e-master-0"]
    assert again["e2e-worker-0"] != uids["e2e-worker-0"]
    assert set(job.hosts()) & {leader, follower} == {leader}
    assert job.incidents() == [("host-lost", follower)]

    job.kube.lose_node(leader)
    job.wait_until_attempt(3)
    after = job.uids()
    assert after["e2e-worker-0"] == again["e2e-worker-0"]
    assert len(job.leaders()) == 2
    assert set(job.hosts()) & {leader, follower} == set()
    assert job.incidents() == [("host-lost", follower), ("leader-lost", leader)]
    job.kube.restart_api_server()
    job.wait_for_end()
    assert job.attempts() == 3
    assert sorted(job.losses()) == list(range(1, STEPS + 1))

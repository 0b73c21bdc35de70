"""Ranks are bound to the nodes that were granted, below the switches that Slurm tells of."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.contract import exits
from tests.e2e.job import wait_for
from tests.slurm.e2e.scheduler_job import NAME, Job, job_on, uninterrupted
from tests.slurm.testbed import running_testbed

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture
def wide(slurm_there: None, tmp_path: Path) -> Iterator[Job]:
    """16 nodes below 2 leaf switches."""
    with (
        running_testbed(nodes=16, gpus=1, knobs={"TB_LEAF": "8"}) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        yield job


def leaves(job: Job, hosts: list[str]) -> list[str]:
    """The leaf switch above each host, as Slurm says it."""
    (leader,) = job.events("LeaderStarted")
    return [leader["allocation"]["switches"][host][-1] for host in hosts]


def test_sixteen_nodes_below_two_leaf_switches(wide: Job) -> None:
    """Replicas talk least and go across; what talks in every layer stays below one switch."""
    shape = {"cluster.hosts": "16", "train.global_batch_size": "16"}
    mesh = {"parallel.dp_replicate": "2", "parallel.dp_shard": "8"}
    # Trying 16 hosts together takes 16 imports of torch: more than this machine does in a minute.
    # Nor do its ranks get to a step: with their launchers they take 8 GB, and 32 such imports.
    wide.submitted(**shape, **mesh, **{"resilience.preflight": "false"})
    wait_for(lambda: wide.decided("StartAttempt"), "the first attempt", 240)
    assert wide("cancel", NAME).code == exits.OK
    wide.until_left()

    (start,) = wide.decided("StartAttempt")
    hosts = start["hosts"]
    assert sorted(hosts) == sorted(wide.slurm.names)
    below = leaves(wide, hosts)
    assert [len(set(below[:8])), len(set(below[8:]))] == [1, 1], below
    assert below[0] != below[8]
    beyond_host, beyond_leaf, *_ = start["crossing"]
    assert beyond_host > beyond_leaf > 0, start["crossing"]


def test_four_nodes_below_two_leaf_switches_train(slurm_there: None, tmp_path: Path) -> None:
    shape = {
        "cluster.hosts": "4",
        "parallel.dp_replicate": "2",
        "parallel.dp_shard": "2",
    }
    with (
        running_testbed(nodes=4, gpus=1, knobs={"TB_LEAF": "2"}) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        job.submitted(**shape)
        job.until_ended()
        (start,) = job.decided("StartAttempt")
        below = leaves(job, start["hosts"])
        assert below[0] == below[1] != below[2] == below[3]
        beyond_host, beyond_leaf, *_ = start["crossing"]
        assert beyond_host > beyond_leaf > 0, start["crossing"]
        assert job.losses() == uninterrupted(**shape)
        job.assert_blameless()

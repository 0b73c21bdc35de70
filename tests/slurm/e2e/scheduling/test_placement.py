"""Ranks are placed on the granted nodes with regard to the switches that Slurm reports."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.e2e.two_node_job import Job, job_on, uninterrupted
from tests.slurm.testbed import running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = {
    "model.config.hidden_size": "64",
    "model.config.intermediate_size": "128",
    "model.config.num_hidden_layers": "2",
}
"""A model that is small enough for many ranks on few cores."""
LOSS_TOLERANCE = 1e-4
"""Tolerance between float32 losses of two meshes after a few steps."""


@pytest.fixture
def wide(slurm_available: None, tmp_path: Path) -> Iterator[Job]:
    """16 nodes below 2 leaf switches."""
    with (
        running_testbed(nodes=16, gpus=1, knobs={"TB_LEAF": "8"}) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        yield job


def leaves(job: Job, hosts: list[str]) -> list[str]:
    """The leaf switch of each host, as Slurm reports it."""
    (leader,) = job.events("LeaderStarted")
    return [leader["allocation"]["switches"][host][-1] for host in hosts]


def nodes_of(ranks: dict[int, int]) -> dict[int, str]:
    """Rank to its node, read from the environment that Slurm sets; without ended ranks."""
    found = {}
    for rank, pid in ranks.items():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_text()
            (found[rank],) = re.findall(r"\0SLURMD_NODENAME=([^\0]*)\0", environ)
    return found


def test_a_job_trains_on_sixteen_nodes_below_two_leaf_switches(wide: Job) -> None:
    """Replicas communicate least, so they are placed across switches. Ranks that communicate in
    every layer share a switch."""
    training = {**SMALL, "train.global_batch_size": "16", "train.steps": "6"}
    mesh = {"cluster.hosts": "16", "parallel.dp_replicate": "2", "parallel.dp_shard": "8"}
    # On two cores, 16 imports of torch take longer than the minute that the host check may take.
    wide.submit_successfully(**training, **mesh, **{"resilience.preflight": "false"})
    seen = wide.wait_until("16 ranks", lambda: len(found := nodes_of(wide.ranks())) == 16 and found)
    wide.wait_for_end()

    (start,) = wide.actions_of_kind("StartAttempt")
    hosts = start["hosts"]
    assert sorted(hosts) == sorted(wide.slurm.names)
    below = leaves(wide, hosts)
    assert [len(set(below[:8])), len(set(below[8:]))] == [1, 1], below
    assert below[0] != below[8]
    beyond_host, beyond_leaf, *_ = start["crossing"]
    assert beyond_host > beyond_leaf > 0, start["crossing"]
    assert seen == dict(enumerate(hosts)), "ranks are on the nodes of the plan"
    alone = uninterrupted(**training, **{"cluster.hosts": "1"})
    assert wide.losses() == pytest.approx(alone, abs=LOSS_TOLERANCE)
    wide.assert_succeeded_without_incident()


def test_a_job_trains_on_four_nodes_below_two_leaf_switches(
    slurm_available: None, tmp_path: Path
) -> None:
    shape = {"cluster.hosts": "4", "parallel.dp_replicate": "2", "parallel.dp_shard": "2"}
    with (
        running_testbed(nodes=4, gpus=1, knobs={"TB_LEAF": "2"}) as testbed,
        job_on(testbed, tmp_path / "runs") as job,
    ):
        job.submit_successfully(**shape)
        job.wait_for_end()
        (start,) = job.actions_of_kind("StartAttempt")
        below = leaves(job, start["hosts"])
        assert below[0] == below[1] != below[2] == below[3]
        beyond_host, beyond_leaf, *_ = start["crossing"]
        assert beyond_host > beyond_leaf > 0, start["crossing"]
        assert job.losses() == uninterrupted(**shape)
        job.assert_succeeded_without_incident()

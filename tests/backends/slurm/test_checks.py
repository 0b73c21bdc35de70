from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.slurm.checks import problems
from orchestrator.cluster.slurm.nodes import Node
from orchestrator.cluster.slurm.partitions import Partition
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.slurm import ContainerSpec, SlurmSpec
from tests.backends.slurm.slurm_launch import a_launch

TRAIN = Partition(
    name="train",
    state="UP",
    default=True,
    nodes=(),
    max_time_s=3600,
    max_nodes=4,
)
DEBUG = replace(TRAIN, name="debug", default=False, state="DOWN")
NODES = [Node(name=f"node{i}", state="IDLE", gpus=2, partitions=("train",)) for i in (1, 2, 3)]


def found(launch: LaunchPlan, python: str = "/bin/sh") -> list[str]:
    return [str(one) for one in problems(launch, python, [TRAIN, DEBUG], NODES)]


def spec(tmp_path: Path, hosts: int = 2, **keys: object) -> LaunchPlan:
    return a_launch(tmp_path, hosts, SlurmSpec(**keys))  # type: ignore[arg-type]


def test_a_job_that_fits_has_no_problem(tmp_path: Path) -> None:
    assert found(spec(tmp_path, 3, time="1:00:00")) == []
    assert found(spec(tmp_path, partition="train,debug")) == []


@pytest.mark.parametrize(
    ("hosts", "keys", "said"),
    [
        (2, {"partition": "trian"}, "one of debug, train, got 'trian'"),
        (2, {"partition": "debug"}, "up, but it is DOWN"),
        (2, {"time": "1:01:00"}, "at most the partition's 1:00:00"),
        (5, {}, "at most the partition's 4 nodes a job"),
        (4, {}, "at most 3, the nodes of partition train that have 2 GPUs"),
        (3, {"exclude": "node[1-2]"}, "at most 1, the nodes"),
        (2, {"exclude": "node[1-"}, "cluster.slurm.exclude: must be a closing bracket"),
    ],
)
def test_what_slurm_could_not_do_is_named_with_its_limit(
    tmp_path: Path, hosts: int, keys: dict[str, object], said: str
) -> None:
    assert any(said in line for line in found(spec(tmp_path, hosts, **keys)))


def test_too_many_gpus_a_node_and_ranks_that_need_none(tmp_path: Path) -> None:
    launch = replace(spec(tmp_path), devices_per_host=8)
    assert any("at most 2, what a node" in line for line in found(launch))
    cpu = replace(launch, slurm=SlurmSpec(gpus="none"))
    assert found(cpu) == []


def test_paths_are_looked_at(tmp_path: Path) -> None:
    assert any("absolute" in line for line in found(a_launch("runs/job")))
    assert any("without %" in line for line in found(a_launch(tmp_path / "%j")))
    assert any("interpreter" in line for line in found(spec(tmp_path), "/no/python"))
    (tmp_path / "file").touch()
    assert any("may write" in line for line in found(a_launch(tmp_path / "file" / "job")))


def test_the_run_directory_has_to_be_in_the_container(tmp_path: Path) -> None:
    without = ContainerSpec(image="a.sqsh", mounts=("/data:/data", f"{tmp_path}:/elsewhere"))
    assert any("container.mounts" in line for line in found(spec(tmp_path, container=without)))
    mounted = ContainerSpec(image="a.sqsh", mounts=(f"{tmp_path}:{tmp_path}:rw",))
    assert found(spec(tmp_path / "job", container=mounted), "/no/python") == []

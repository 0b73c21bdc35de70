import grp
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.backends.slurm.checks import closed, is_never_available, problems
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import ContainerSpec, SlurmSpec
from orchestrator.inventory.slurm.nodes import Node
from orchestrator.inventory.slurm.partitions import Partition
from tests.backends.slurm.slurm_launch import a_launch

TRAIN = Partition(name="train", state="UP", default=True, nodes=(), max_time_s=3600, max_nodes=4)
DEBUG = replace(TRAIN, name="debug", default=False, state="DOWN")
NODES = [
    Node(name=f"node{i}", state="IDLE", cpus=8, memory_mib=64_000, gpus=2, partitions=("train",))
    for i in (1, 2, 3)
]


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
        (2, {"partition": "trian"}, "must be a partition of this cluster, got 'trian'"),
        (2, {"partition": "debug"}, "up, but it is DOWN"),
        (2, {"time": "1:01:00"}, "at most 1:00:00"),
        (2, {"time": "1:10:00", "notice_s": 4000}, "at most 1:00:00"),
        (2, {"time": "1:10:00", "notice_s": 4000}, "less than 3600 s, the time limit of the"),
        (2, {"notice_s": 3600}, "notice_s: must be less than 3600 s, the default time limit"),
        (5, {}, "at most 4 with spare_hosts"),
        (4, {}, "at most 3 with spare_hosts, the nodes of partition train with 2 GPUs"),
        (3, {"exclude": "node[1-2]"}, "at most 1 with spare_hosts, the nodes"),
        (2, {"exclude": "node[1-"}, "cluster.slurm.exclude: must be written with a closing"),
        (2, {"cpus_per_task": 9}, "cluster.slurm.cpus_per_task: must be at most 8, the CPUs"),
        (2, {"mem": "900G"}, "cluster.slurm.mem: must be at most 64000M, the memory"),
        (2, {"constraint": "ib"}, "at most 0 with spare_hosts, the nodes of partition train"),
    ],
)
def test_requests_that_slurm_cannot_meet_are_named_with_the_limit(
    tmp_path: Path, hosts: int, keys: dict[str, object], said: str
) -> None:
    assert any(said in line for line in found(spec(tmp_path, hosts, **keys)))


def test_everything_that_a_node_lacks_is_named_at_once(tmp_path: Path) -> None:
    launch = replace(spec(tmp_path, cpus_per_task=9, mem="1T"), devices_per_host=8)
    places = [line.partition(":")[0] for line in found(launch)]
    assert places == ["cluster.gpus_per_host", "cluster.slurm.cpus_per_task", "cluster.slurm.mem"]


@pytest.mark.parametrize("mem", ["0", "64000", "62G", "62g", "of-node", None])
def test_memory_that_a_node_has_is_no_problem(tmp_path: Path, mem: str | None) -> None:
    assert found(spec(tmp_path, mem=mem, cpus_per_task=8)) == []


def test_a_reservation_that_has_yet_to_begin_is_no_problem(tmp_path: Path) -> None:
    assert found(spec(tmp_path, reservation="night")) == []


@pytest.mark.parametrize(
    ("hosts", "keys", "never"),
    [
        (2, {}, True),
        (3, {}, False),
        (2, {"gres": "nvme:1"}, False),
        (2, {"constraint": "[rack1|rack2]"}, False),
    ],
)
def test_a_request_waits_only_for_nodes_that_may_meet_it(
    tmp_path: Path, hosts: int, keys: dict[str, object], never: bool
) -> None:
    drained = [*NODES[:2], replace(NODES[2], flags=frozenset({"DRAIN"}))]
    launch = spec(tmp_path, hosts, **keys)
    assert is_never_available(launch, [TRAIN], drained) is never
    assert is_never_available(launch, [TRAIN], NODES)


def test_nodes_that_are_down_are_named_with_the_reason(tmp_path: Path) -> None:
    power = [replace(node, state="DOWN", reason="power") for node in NODES[:2]]
    drained = [*power, replace(NODES[2], flags=frozenset({"DRAIN"}))]
    assert closed(spec(tmp_path, 2), [TRAIN], drained) == "node[1-2] (power), node3"
    assert closed(spec(tmp_path, 2), [TRAIN], NODES) == ""


def test_a_partial_node_list_is_left_to_slurm(tmp_path: Path) -> None:
    """`sbatch --test-only -N2 -w node1` reports unavailable nodes, but sbatch runs the job."""
    by_key = spec(tmp_path, nodelist="node1")
    by_option = spec(tmp_path, sbatch_args=("--nodelist=node1",))
    assert not is_never_available(by_key, [TRAIN], NODES)
    assert not is_never_available(by_option, [TRAIN], NODES)


def test_too_many_gpus_per_node_are_refused_unless_ranks_need_none(tmp_path: Path) -> None:
    launch = replace(spec(tmp_path), devices_per_host=8)
    assert any("at most 2, the GPUs of the largest node" in line for line in found(launch))
    cpu = replace(launch, slurm=SlurmSpec(gpus="none"))
    assert found(cpu) == []


def test_paths_are_checked(tmp_path: Path) -> None:
    assert any("absolute" in line for line in found(a_launch("runs/job")))
    assert any("without %" in line for line in found(a_launch(tmp_path / "%j")))
    assert any("interpreter" in line for line in found(spec(tmp_path), "/no/python"))
    (tmp_path / "file").touch()
    assert any("can write" in line for line in found(a_launch(tmp_path / "file" / "job")))


def test_a_run_directory_outside_the_containers_mounts_is_refused(tmp_path: Path) -> None:
    without = ContainerSpec(image="a.sqsh", mounts=("/data:/data", f"{tmp_path}:/elsewhere"))
    assert any("container.mounts" in line for line in found(spec(tmp_path, container=without)))
    mounted = ContainerSpec(image="a.sqsh", mounts=(f"{tmp_path}:{tmp_path}:rw",))
    assert found(spec(tmp_path / "job", container=mounted), "/no/python") == []


def test_a_foreign_group_is_named_with_the_users_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    own = grp.getgrgid(os.getegid()).gr_name
    assert found(spec(tmp_path, group=own, mode=750)) == []
    (said,) = found(spec(tmp_path, group="no-such-group", mode=750))
    assert "cluster.slurm.group: must be a Unix group that you are in, one of " in said
    assert own in said

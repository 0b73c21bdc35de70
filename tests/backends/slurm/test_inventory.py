"""Inventory of a Slurm cluster: the queries, and the errors if Slurm is down."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.inventory import hosts_for, read_cluster
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.errors import BackendError, PlanError, SpecError
from orchestrator.inventory.slurm.gpus import gpu_table
from orchestrator.inventory.slurm.inventory import Use
from orchestrator.seams import Completed, Shell
from tests.agent.world import TurnedClock
from tests.inventory.slurm.captured import captured

TABLE = gpu_table({})


@dataclass
class CapturedCluster:
    """A shell that gives the captured answers of a real cluster."""

    files: str = "typed-"
    answers: dict[str, Completed] = field(default_factory=dict)
    slurm_of: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        self.slurm_of.append(tuple(argv))
        what = next(word for word in ("nodes", "topology", "partitions") if word in argv)
        assert what == "topology" or "-a" in argv, "-a is needed to see hidden partitions"
        text = captured(f"22.05/{self.files}{what}.txt")
        return self.answers.get(what, Completed(0, text, ""))


def slurm_of(shell: Shell) -> Slurm:
    return Slurm(shell, TurnedClock())


def cluster(hosts: int, spares: int = 0, **slurm: object) -> ClusterSpec:
    keys = replace(SlurmSpec(), **slurm)
    return ClusterSpec(
        backend="slurm", hosts=hosts, gpus_per_host=8, spare_hosts=spares, slurm=keys
    )


def test_a_named_partition_alone_is_read() -> None:
    assert {node.name for node in read_cluster(slurm_of(CapturedCluster()), "cpu").nodes} == {
        "c1",
        "c2",
    }
    assert len(read_cluster(slurm_of(CapturedCluster()), "cpu,h100").nodes) == 10


def test_of_several_partitions_only_those_that_take_jobs_are_read() -> None:
    assert len(read_cluster(slurm_of(CapturedCluster()), "a100,h100").nodes) == 8


def test_without_a_partition_all_nodes_or_the_default_partition_are_read() -> None:
    assert len(read_cluster(slurm_of(CapturedCluster()), None, whole=True).nodes) == 18
    assert {node.name for node in read_cluster(slurm_of(CapturedCluster()), None).nodes} == {
        f"n0{i}" for i in range(1, 9)
    }


def test_a_partition_that_takes_no_jobs_has_no_free_hosts() -> None:
    found = read_cluster(slurm_of(CapturedCluster()), "a100").inventory(TABLE, Use())
    assert {host.reason for host in found.hosts} == {"partition a100 is DRAIN"}
    assert found.with_devices(8) == ()


def test_an_unknown_partition_is_named_with_the_known_ones() -> None:
    with pytest.raises(BackendError) as caught:
        read_cluster(slurm_of(CapturedCluster()), "h100,gpu")
    assert caught.value.message == "cluster.slurm.partition: Slurm has no partition gpu"
    assert caught.value.fix == "did you mean cpu? partitions of this cluster: a100, cpu, h100"


def test_the_topology_of_a_partition_is_used() -> None:
    text = captured("22.05/typed-partitions.txt").replace(" State=UP", " Topology=nv State=UP")
    shell = CapturedCluster(answers={"partitions": Completed(0, text, "")})
    read_cluster(slurm_of(shell), "h100")
    assert shell.slurm_of[-1] == ("scontrol", "show", "topology", "nv")


def test_a_cluster_without_a_topology_is_flat() -> None:
    refused = Completed(1, "", "slurm_load_topo error: Requested operation not supported")
    shell = CapturedCluster(answers={"topology": refused})
    assert {
        host.switches for host in read_cluster(slurm_of(shell), None).inventory(TABLE, Use()).hosts
    } == {()}


def test_a_slurmctld_that_does_not_answer_is_an_error_with_a_fix() -> None:
    down = Completed(
        1, "", "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n"
    )
    with pytest.raises(BackendError) as caught:
        read_cluster(slurm_of(CapturedCluster(answers={"partitions": down})), None)
    assert "Unable to contact slurm controller" in caught.value.message
    assert "scontrol ping" in caught.value.fix


def test_a_machine_without_slurm_is_an_error_with_a_fix() -> None:
    missing = Completed(127, "", "[Errno 2] No such file or directory: 'scontrol'")
    with pytest.raises(BackendError, match="there is no Slurm here") as caught:
        read_cluster(slurm_of(CapturedCluster(answers={"nodes": missing})), None, whole=True)
    assert "run this on a login node" in caught.value.fix


def test_a_machine_that_belongs_to_no_cluster_is_an_error_with_a_fix() -> None:
    """The commands of Slurm 22.05 on a laptop, as they said it."""
    alone = Completed(
        1,
        "",
        "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "scontrol: error: fetch_config: DNS SRV lookup failed\n"
        "scontrol: error: _establish_config_source: failed to fetch config\n"
        "scontrol: fatal: Could not establish a configuration source\n",
    )
    with pytest.raises(BackendError) as caught:
        read_cluster(slurm_of(CapturedCluster(answers={"partitions": alone})), None)
    assert (
        caught.value.message
        == "there is no Slurm here: scontrol finds no configuration of a cluster"
    )
    assert "run this on a login node" in caught.value.fix


MUNGED_IS_DOWN = Completed(
    1,
    "",
    "scontrol: error: If munged is up, restart with --num-threads=10\n"
    'scontrol: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such'
    " file or directory (Did you start munged?)\n"
    "scontrol: error: slurm_send_node_msg: auth_g_create: REQUEST_PARTITION_INFO has authentication"
    " error\n"
    "slurm_load_partitions error: Protocol authentication error\n",
)


def test_a_host_without_munged_is_told_to_start_it() -> None:
    with pytest.raises(BackendError) as caught:
        read_cluster(slurm_of(CapturedCluster(answers={"partitions": MUNGED_IS_DOWN})), None)
    assert caught.value.message == (
        "munged does not answer on this host, and Slurm needs it: Failed to access"
        ' "/run/munge/munge.socket.2": No such file or directory'
    )
    assert "systemctl start munge" in caught.value.fix


def test_a_command_that_hangs_is_an_error() -> None:
    def hang(argv: Sequence[str], /, *, timeout: float) -> Completed:
        raise TimeoutError(f"{argv[0]} did not end within {timeout:.0f} s")

    with pytest.raises(BackendError, match="did not end within 30 s"):
        read_cluster(slurm_of(hang), None)


def test_a_job_is_planned_on_free_hosts() -> None:
    found = hosts_for(slurm_of(CapturedCluster()), TABLE, cluster(6, spares=2))
    assert [host.name for host in found.inventory.with_devices(8)] == [
        f"n0{i}" for i in range(1, 9)
    ]
    assert found.notes == ()


def test_a_job_that_has_to_wait_is_planned_on_busy_hosts() -> None:
    text = captured("22.05/typed-nodes.txt").replace(
        "State=IDLE+CLOUD+POWERED_DOWN", "State=ALLOCATED+CLOUD", 12
    )  # the a100 nodes, the nodes without GPUs and two h100 nodes
    shell = CapturedCluster(answers={"nodes": Completed(0, text, "")})
    found = hosts_for(slurm_of(shell), TABLE, cluster(4, partition="h100,cpu"))
    assert len(found.inventory.with_devices(8)) == 6
    found = hosts_for(slurm_of(shell), TABLE, cluster(8, partition="h100,cpu"))
    assert len(found.inventory.with_devices(8)) == 8
    assert found.notes == (
        "only 6 of 8 hosts are free; the plan includes busy hosts, so the job waits in the queue",
    )
    found = hosts_for(slurm_of(shell), TABLE, cluster(9, partition="h100,cpu"))
    assert len(found.inventory.with_devices(8)) == 8


def with_nodes(state: str, count: int, more: str = "") -> CapturedCluster:
    """The captured cluster with the first `count` idle nodes in another state."""
    idle = "State=IDLE+CLOUD+POWERED_DOWN"
    text = captured("22.05/typed-nodes.txt").replace(idle, f"State={state}{more}", count)
    return CapturedCluster(answers={"nodes": Completed(0, text, "")})


def test_a_job_is_planned_on_hosts_that_are_down_only_if_no_others_are_enough() -> None:
    """Slurm queues a job over a maintenance, and so does ndctl."""
    shell = with_nodes("DOWN", 12, " Reason=power [root@2026-11-30T20:00:00]")
    found = hosts_for(slurm_of(shell), TABLE, cluster(6, partition="h100,cpu"))
    assert (len(found.inventory.with_devices(8)), found.notes) == (6, ())
    found = hosts_for(slurm_of(shell), TABLE, cluster(6, spares=1, partition="h100,cpu"))
    assert (len(found.inventory.with_devices(8)), found.notes) == (6, ())
    found = hosts_for(slurm_of(shell), TABLE, cluster(8, partition="h100,cpu"))
    assert len(found.inventory.with_devices(8)) == 8
    assert found.notes == (
        "only 6 of 8 hosts are up, so the job waits in the queue until more are back: each of n01,"
        " n02 is drained (down: power)",
    )


def test_a_host_that_ndctl_excludes_stays_excluded_while_it_is_down() -> None:
    shell = with_nodes("DOWN", 12)
    found = hosts_for(slurm_of(shell), TABLE, cluster(8, partition="h100,cpu"), {"n01": "strikes"})
    names = {host.name for host in found.inventory.with_devices(8)}
    assert ("n01" in names, "n02" in names) == (False, True)


@pytest.mark.parametrize(
    ("keys", "said", "fix"),
    [
        (
            {"constraint": "moon"},
            "is not selected (without the feature moon)",
            "change or remove cluster.slurm.constraint; `sinfo",
        ),
        (
            {"exclude": "n0[1-8]"},
            "is excluded (by the spec)",
            "change or remove cluster.slurm.exclude; `sinfo",
        ),
        (
            {"constraint": "moon", "nodelist": "n01"},
            "is not selected (not in the spec's nodelist)",
            "change or remove cluster.slurm.constraint or cluster.slurm.nodelist; `sinfo",
        ),
    ],
)
def test_if_the_spec_selects_no_host_the_fix_names_its_keys(
    keys: dict[str, Any], said: str, fix: str
) -> None:
    with pytest.raises(PlanError, match="the spec leaves no host of the partition: ") as refused:
        hosts_for(slurm_of(CapturedCluster()), TABLE, cluster(2, partition="h100", **keys))
    assert said in refused.value.message
    assert refused.value.fix.startswith(fix)


def test_unknown_gpus_are_an_error_that_asks_for_a_profile() -> None:
    text = captured("22.05/typed-nodes.txt").replace("gpu:nvidia_h100_80gb_hbm3", "gpu:x900")
    shell = CapturedCluster(answers={"nodes": Completed(0, text.replace("ib,h100", "ib"), "")})
    with pytest.raises(PlanError) as caught:
        hosts_for(slurm_of(shell), TABLE, cluster(2))
    assert "Slurm reports gpu:x900 (features: ib) for n01" in caught.value.message
    assert 'gpus: [{type: "x900", profile' in caught.value.fix


def test_a_malformed_host_list_is_an_error() -> None:
    with pytest.raises(SpecError, match="n\\[1-"):
        hosts_for(slurm_of(CapturedCluster()), TABLE, cluster(2, exclude="n[1-"))


def test_a_node_that_ndctl_excludes_is_not_planned_on() -> None:
    why = {"n01": "until tomorrow: 2 strikes"}
    found = hosts_for(slurm_of(CapturedCluster()), TABLE, cluster(6), why).inventory
    names = [host.name for host in found.with_devices(8)]
    assert "n01" not in names
    assert found.left_out(8)["n01"] == "is excluded (until tomorrow: 2 strikes)"


def test_nodes_unknown_to_slurm_are_all_named_at_once() -> None:
    wish = cluster(2, nodelist="n[01-02],ghost7", exclude="n03,phantom[1-2]")
    with pytest.raises(SpecError) as caught:
        hosts_for(slurm_of(CapturedCluster()), TABLE, wish)
    assert caught.value.message.splitlines() == [
        "cluster.slurm.nodelist: unknown node ghost7",
        "cluster.slurm.exclude: unknown node phantom[1-2]",
    ]
    assert "sinfo -N" in caught.value.fix


def test_a_node_of_another_partition_is_known() -> None:
    with pytest.raises(SpecError, match="nodelist: c1 is not in partition h100"):
        hosts_for(
            slurm_of(CapturedCluster()), TABLE, cluster(2, partition="h100", nodelist="n01,c1")
        )
    hosts_for(slurm_of(CapturedCluster()), TABLE, cluster(2, partition="h100", exclude="c1"))


def test_a_partition_that_is_down_is_named_instead_of_its_nodes() -> None:
    text = captured("22.05/typed-partitions.txt").replace("State=UP", "State=DOWN")
    shell = CapturedCluster(answers={"partitions": Completed(0, text, "")})
    with pytest.raises(PlanError, match=r"^cluster.slurm.partition: h100 is DOWN") as refused:
        hosts_for(slurm_of(shell), TABLE, cluster(1, partition="h100"))
    assert refused.value.fix.startswith("use another partition")

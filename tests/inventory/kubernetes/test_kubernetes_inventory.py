"""Inventories from nodes of GKE, EKS and an on-premises site."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec, Toleration
from orchestrator.errors import SpecError
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.kubernetes.gpus import gpu_table, profile_of
from orchestrator.inventory.kubernetes.inventory import Use, inventory_of, use_of
from orchestrator.inventory.kubernetes.nodes import Node, parse_node
from orchestrator.inventory.kubernetes.pods import taken
from orchestrator.inventory.kubernetes.standing import shut_nodes
from orchestrator.inventory.kubernetes.taints import NOT_READY, is_tolerated, tolerations_of
from orchestrator.inventory.kubernetes.topology import allocation_switches
from tests.inventory.kubernetes.objects import GPU, captured, container, node, pod

TABLE = gpu_table({})
RACK = "topology.kubernetes.io/rack"
BLOCK = "topology.kubernetes.io/block"


def cluster(hosts: int = 2, gpus: int = 8, **keys: Any) -> ClusterSpec:
    return ClusterSpec(
        backend="kubernetes", hosts=hosts, gpus_per_host=gpus, kubernetes=KubernetesSpec(**keys)
    )


def look(
    items: list[dict[str, Any]],
    pods: list[dict[str, Any]] | None = None,
    patient: bool = False,
    gpus: int = 8,
    **keys: Any,
) -> Inventory:
    use = replace(use_of(cluster(gpus=gpus, **keys)), patient=patient)
    nodes = [parse_node(item) for item in items]
    return inventory_of(nodes, taken(pods or (), use.resources), TABLE, use)


def standings(found: Inventory) -> Mapping[str, tuple[str, str, int]]:
    return {host.name: (host.state, host.reason, host.devices) for host in found.hosts}


def test_gke_labels_give_accelerator_and_nested_blocks() -> None:
    found = look(captured("gke"))
    assert len(found.hosts) == 8, "a node without GPUs is no host"
    assert {(h.state, h.devices, h.profile and h.profile.name) for h in found.hosts} == {
        ("free", 8, "h100-sxm-80gb")
    }
    assert found.hosts[0].switches[0] == "us-central1-a"
    assert len({host.switches[:2] for host in found.hosts}) == 2
    assert len({host.switches for host in found.hosts}) == 4
    fabric = found.fabric(8)
    assert fabric is not None
    assert fabric.hosts_per_leaf == 2


def test_eks_labels_give_machine_type_and_three_layers() -> None:
    found = look(captured("eks"))
    kinds = {host.name: host.profile.name for host in found.hosts if host.profile}
    assert list(kinds.values()) == ["h100-sxm-80gb"] * 4 + ["a100-sxm-40gb"]
    assert {len(host.switches) for host in found.hosts} == {4}
    assert not [host for host in found.hosts if host.name.startswith("fargate")]
    assert list(found.left_out(8)) == ["ip-10-0-4-17.us-west-2.compute.internal"]


def test_all_problems_of_a_sites_table_are_reported() -> None:
    found = standings(look(captured("onprem")))
    assert found == {
        "dgx-00": ("free", "", 8),
        "dgx-01": ("free", "", 8),
        "dgx-02": ("cordoned", "", 8),
        "dgx-03": ("not ready", "NodeStatusUnknown: Kubelet stopped posting node status.", 8),
        "dgx-04": ("free", "", 7),
        "dgx-05": ("tainted", "dedicated=inference:NoSchedule", 8),
        "dgx-06": ("free", "", 8),
        "dgx-07": ("free", "", 32),
        "dgx-08": (
            "not ready",
            "none of its nvidia.com/gpu is available: check its device plugin",
            0,
        ),
    }


def test_a_node_is_placed_below_the_last_switch_that_its_labels_name() -> None:
    hosts = {host.name: host for host in look(captured("onprem")).hosts}
    assert hosts["dgx-00"].switches == ("hall-0", "rack-0")
    assert hosts["dgx-06"].switches == ("hall-1",)
    assert hosts["dgx-07"].profile is None, "a part of a GPU is none of our profiles"


def test_below_an_unknown_switch_the_position_is_unknown() -> None:
    items = [node("a", {BLOCK: "b", RACK: "r"}), node("b", {RACK: "r"}), node("c")]
    assert [host.switches for host in look(items).hosts] == [("b", "r"), (), ()]


def test_switches_come_from_the_labels_in_the_spec() -> None:
    items = [node(name, {"site/pod": name[0], RACK: "r"}) for name in ("a1", "a2", "b1")]
    found = look(items, topology_labels=("no/such", "site/pod"))
    assert [host.switches for host in found.hosts] == [("a",), ("a",), ("b",)]


def test_a_block_is_an_nvlink_block_only_with_nvlink() -> None:
    clique = {"nvidia.com/gpu.clique": "7e21.0"}
    l40s = {"nvidia.com/gpu.product": "NVIDIA-L40S", **clique}
    hosts = look([node("a", clique), node("b", clique), node("c", l40s)]).hosts
    assert [host.nvlink_block for host in hosts] == ["7e21.0", "7e21.0", None]


@pytest.mark.parametrize(
    ("pods", "standing"),
    [
        ([], ("free", "", 8)),
        ([pod("n", container(gpu="2"))], ("free", "", 6)),
        ([pod("n", container(gpu="8"), name="x")], ("busy", f"8 of 8 {GPU} taken by team-a/x", 8)),
        (
            [pod("n", container(gpu="4"), name=name) for name in ("x", "y")],
            ("busy", f"8 of 8 {GPU} taken by team-a/x and 1 more", 8),
        ),
        ([pod("n", container(gpu="9"), name="x")], ("busy", f"9 of 8 {GPU} taken by team-a/x", 8)),
        ([pod("n", container(cpu="60"))], ("free", "", 8)),
        ([pod("other", container(gpu="8"))], ("free", "", 8)),
    ],
)
def test_resources_used_by_other_pods_are_counted(
    pods: list[dict[str, Any]], standing: tuple[str, str, int]
) -> None:
    assert standings(look([node("n")], pods))["n"] == standing
    assert standings(look([node("n")], pods, patient=True))["n"] == ("free", "", 8)


def test_requests_for_cpus_and_memory_are_checked_too() -> None:
    others = [pod("n", container(cpu="40", memory="100Gi"), name="x")]
    busy = standings(look([node("n")], others, cpu="32"))["n"]
    assert busy == ("busy", "40 of 64 cpu taken by team-a/x", 8)
    assert standings(look([node("n")], others, cpu="24", memory="400Gi"))["n"][0] == "free"
    less = standings(look([node("n")], others, memory="1Ti", patient=True))["n"]
    assert less == ("not selected", "has 512Gi of 1024Gi memory that a pod requests", 8)
    rdma = standings(look([node("n")], rdma_resource="rdma/hca"))["n"]
    assert rdma[1] == "has 0 of 1 rdma/hca that a pod requests"


def test_the_spec_selects_nodes() -> None:
    items = [node("a", {"pool": "train"}), node("b", {"pool": "serve"}), node("c")]
    found = standings(look(items, node_selector={"pool": "train"}, exclude=("a",)))
    assert {name: (state, reason) for name, (state, reason, _) in found.items()} == {
        "a": ("excluded", "by the spec"),
        "b": ("not selected", "has pool=serve, but node_selector requires train"),
        "c": ("not selected", "without the label pool=train"),
    }


def test_the_state_is_shown_in_the_terms_of_the_cluster() -> None:
    """Otherwise users of `kubectl` would look for a drain that does not exist."""
    cordoned, small = node("b", {"pool": "train"}, unschedulable=True), node("c", {"pool": "train"})
    small["status"]["allocatable"] = {**small["status"]["allocatable"], "memory": "64Gi"}
    items = [node("a"), cordoned, small]
    found = look(items, node_selector={"pool": "train"}, memory="500Gi").left_out(8)
    assert found == {
        "a": "is not selected (without the label pool=train)",
        "b": "is cordoned",
        "c": "is not selected (has 64Gi of 500Gi memory that a pod requests)",
    }


@pytest.mark.parametrize(
    ("toleration", "free"),
    [
        (Toleration(), True),
        (Toleration(key="dedicated"), True),
        (Toleration(key="dedicated", effect="NoSchedule"), True),
        (Toleration(key="dedicated", effect="NoExecute"), False),
        (Toleration(key="dedicated", operator="Equal", value="inference"), True),
        (Toleration(key="dedicated", operator="Equal", value="training"), False),
        (Toleration(key="other"), False),
    ],
)
def test_a_tolerated_taint_is_ignored(toleration: Toleration, free: bool) -> None:
    taint = {"key": "dedicated", "value": "inference", "effect": "NoSchedule"}
    found = look([node("n", taints=[taint])], tolerations=(toleration,))
    assert (found.hosts[0].state == "free") is free


def test_taints_named_like_the_resource_and_preferences_are_tolerated() -> None:
    taints = [
        {"key": GPU, "value": "present", "effect": "NoSchedule"},
        {"key": "rdma/hca", "effect": "NoSchedule"},
        {"key": "cheap", "effect": "PreferNoSchedule"},
    ]
    items = [node("n", allocatable={"rdma/hca": "1"}, taints=taints)]
    assert look(items, rdma_resource="rdma/hca").hosts[0].state == "free"
    assert (look(items).hosts[0].state, look(items).hosts[0].reason) == (
        "tainted",
        "rdma/hca:NoSchedule",
    )
    spec = KubernetesSpec(rdma_resource="rdma/hca")
    assert all(
        is_tolerated(taint, tolerations_of(spec)) for taint in parse_node(items[0]).taints[:2]
    )


def test_a_cluster_without_gpus_has_places_for_ranks() -> None:
    items = [node("a"), node("b"), node("v", {"type": "virtual-kubelet"})]
    others = [pod("b", container(cpu="63"), name="x")]
    found = look(items, others, gpus=4, gpu_resource=None, cpu="2")
    assert standings(found) == {
        "a": ("free", "", 4),
        "b": ("busy", "63 of 64 cpu taken by team-a/x", 4),
    }
    assert {host.profile.name for host in found.hosts if host.profile} == {"cpu"}
    everything = inventory_of([parse_node(items[0])], {}, TABLE, Use(device=None))
    assert everything.hosts[0].devices == 64, "without a spec, its CPUs"


@given(st.integers(0, 16), st.lists(st.integers(0, 16), max_size=5), st.booleans(), st.booleans())
def test_the_number_of_devices_is_between_zero_and_all(
    there: int, asked: list[int], patient: bool, on_cpus: bool
) -> None:
    items = [node("n", allocatable={GPU: str(there), "cpu": str(there)})]
    pods = [pod("n", container(gpu=str(one), cpu=str(one))) for one in asked]
    use = Use(device=None if on_cpus else GPU, patient=patient)
    found = inventory_of([parse_node(items[0])], taken(pods, use.resources), TABLE, use).hosts[0]
    assert 0 <= found.devices <= there
    if found.state == "free":
        assert found.devices == there - (0 if patient else min(there, sum(asked)))
    else:
        assert there == 0 or sum(asked) >= there


@pytest.mark.parametrize(
    ("labels", "profile"),
    [
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "h100-sxm-80gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-PCIe"}, "h100-pcie-80gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-GB200"}, "gb200-186gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-B300-SXM6-AC"}, "b300-sxm-270gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-NVL"}, None),
        ({"nvidia.com/gpu.product": "NVIDIA-H200"}, "h200-sxm-141gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-B200"}, "b200-sxm-180gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-GB300"}, None),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, "a100-sxm-80gb"),
        ({"nvidia.com/gpu.product": "A100-SXM4-40GB"}, "a100-sxm-40gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb"}, None),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED"}, None),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-PCIE-80GB"}, None),
        ({"nvidia.com/gpu.product": "NVIDIA-L40S"}, "l40s-48gb"),
        ({"nvidia.com/gpu.product": "NVIDIA-GeForce-RTX-4090"}, "rtx4090-24gb"),
        ({"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}, "h100-sxm-80gb"),
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "a100-sxm-40gb"),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, None),
        ({"node.kubernetes.io/instance-type": "p5en.48xlarge"}, "h200-sxm-141gb"),
        ({"node.kubernetes.io/instance-type": "p4d.24xlarge"}, "a100-sxm-40gb"),
        ({"node.kubernetes.io/instance-type": "Standard_ND96isr_H100_v5"}, "h100-sxm-80gb"),
        # Labels of the driver have priority over the machine type.
        (
            {
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED",
                "node.kubernetes.io/instance-type": "p5.48xlarge",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_gpus_are_read_from_labels(labels: Mapping[str, str], profile: str | None) -> None:
    found = profile_of(Node(name="n", labels=labels), TABLE)
    assert (found and found.name) == profile


def test_a_sites_table_has_priority_over_ndctls(tmp_path: Path) -> None:
    own = tmp_path / "gpus.yaml"
    own.write_text('gpus: [{type: nvidia-gb200, feature: "18[0-9]gb", profile: b200-sxm-180gb}]')
    table = gpu_table({"NDCTL_KUBERNETES_GPUS": str(own)})
    labels = {"nvidia.com/gpu.product": "NVIDIA-GB200", "nvidia.com/gpu.memory": "189471"}
    found = profile_of(Node(name="n", labels=labels), table)
    assert found is not None
    assert found.name == "b200-sxm-180gb"
    own.write_text("gpus: [{type: x}]")
    with pytest.raises(SpecError, match="profile"):
        gpu_table({"NDCTL_KUBERNETES_GPUS": str(own)})


def test_a_device_smaller_than_its_profile_is_detected_by_its_label() -> None:
    small = look([node("n", {"nvidia.com/gpu.memory": "65536"})]).hosts[0]
    assert small.device_bytes == 64 * 2**30
    usual = look([node("n", {"nvidia.com/gpu.memory": "81559"})]).hosts[0]
    assert usual.profile is not None
    assert usual.device_bytes == usual.profile.memory_bytes


def test_a_leader_learns_which_of_its_nodes_are_taken_back() -> None:
    """A silent kubelet or a taint against new pods does not count, because its own pods still
    run."""
    items = captured("onprem")[:6] + captured("gke")[:1]
    found = shut_nodes(items, tolerations_of(KubernetesSpec()))
    assert [(one.node, one.state, one.reason) for one in found] == [("dgx-02", "cordoned", "")]
    leaving = node("n")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert [one.state for one in shut_nodes([leaving], ())] == ["being deleted"]
    silent = node("n", taints=[{"key": NOT_READY[1], "effect": "NoExecute"}])
    silent["status"]["conditions"] = []
    assert shut_nodes([silent], ()) == ()


def test_a_taint_counts_for_a_running_job_if_it_ends_pods() -> None:
    def tainted(effect: str) -> list[dict[str, Any]]:
        return [node("n", taints=[{"key": "repair", "value": "now", "effect": effect}])]

    (told,) = shut_nodes(tainted("NoExecute"), ())
    assert (told.state, told.reason) == ("tainted", "repair=now:NoExecute")
    assert shut_nodes(tainted("NoSchedule"), ()) == ()
    assert shut_nodes(tainted("NoExecute"), (Toleration(key="repair"),)) == ()


def test_a_tolerated_cordon_is_ignored() -> None:
    cordon = Toleration(key="node.kubernetes.io/unschedulable")
    assert shut_nodes([node("n", unschedulable=True)], (cordon,)) == ()
    assert len(shut_nodes([node("n", unschedulable=True)], ())) == 1


def test_switches_of_a_leaders_nodes() -> None:
    clique = "nvidia.com/gpu.clique"
    items = [
        node("a", {BLOCK: "b1", RACK: "r1", clique: "c.0"}),
        node("b", {BLOCK: "b1", clique: "c.1"}),
        node("c", {BLOCK: "b1"}),
    ]
    spec = KubernetesSpec()
    assert allocation_switches(items, spec) == {
        "a": ("b1", "r1", "c.0"),
        "b": ("b1", "c.1", "c.1"),
        "c": ("b1", "c", "c"),
    }
    plain = [node("a", {RACK: "r1"}), node("b")]
    assert allocation_switches(plain, spec) == {"a": ("r1",)}

"""Inventory of a Kubernetes cluster: the queries, and the errors if a right is missing."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.cluster_id import cluster_name
from orchestrator.backends.kubernetes.inventory import (
    HostsFor,
    hosts_for,
    kueue_levels,
    read_cluster,
    usual,
)
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.errors import PlanError, Unanswered
from orchestrator.inventory.kubernetes.gpus import gpu_table
from tests.backends.kubernetes.fake_api import FakeApi
from tests.inventory.kubernetes.objects import GPU, container, node, pod

TABLE = gpu_table({})
RACK = "topology.kubernetes.io/rack"


def cluster(hosts: int, spares: int = 0, **keys: Any) -> ClusterSpec:
    return ClusterSpec(
        backend="kubernetes",
        hosts=hosts,
        gpus_per_host=8,
        spare_hosts=spares,
        kubernetes=KubernetesSpec(**keys),
    )


def said(*pods: dict[str, Any], nodes: int = 3, **more: Any) -> FakeApi:
    items = {"nodes": [node(f"n{i}") for i in range(nodes)], "pods": list(pods)}
    return FakeApi(objects=items, **more)


def free(found: HostsFor) -> list[str]:
    return [host.name for host in found.inventory.hosts if host.state == "free"]


def test_free_hosts_are_used_if_there_are_enough() -> None:
    found = hosts_for(said(pod("n0", container(gpu="8"))), TABLE, cluster(2))
    assert (free(found), found.notes) == (["n1", "n2"], ())


def test_if_free_hosts_are_too_few_busy_ones_are_used_with_a_note() -> None:
    api = said(pod("n0", container(gpu="8")))
    found = hosts_for(api, TABLE, cluster(2, spares=1))
    assert free(found) == ["n0", "n1", "n2"]
    assert found.notes == (
        "2 of the 3 hosts are free now: the plan also uses busy hosts, so the job waits"
        " until other users' pods end",
    )
    assert hosts_for(api, TABLE, cluster(3, queue="q")).notes[0].endswith("waits in the queue")
    assert free(hosts_for(api, TABLE, cluster(3, exclude=("n0",)))) == ["n1", "n2"]


def test_without_the_right_to_see_all_pods_a_note_says_which_were_counted() -> None:
    mine = pod("n0", container(gpu="8"))
    theirs = pod("n1", container(gpu="8"))
    theirs["metadata"]["namespace"] = "team-b"
    api = said(mine, theirs, refused=frozenset({"list pods *"}))
    found = hosts_for(api, TABLE, cluster(1))
    assert free(found) == ["n1", "n2"]
    assert found.notes == (
        "ada may not list pods: the usage of pods in other namespaces is unknown, so"
        " only devices used by pods of team-a are excluded",
    )
    assert api.asked == ["list nodes *", "list pods *", "list pods"]
    blind = said(mine, refused=frozenset({"list pods *", "list pods"}))
    found = hosts_for(blind, TABLE, cluster(1))
    assert free(found) == ["n0", "n1", "n2"]
    assert found.notes[0].endswith("so all devices count as free")


def test_without_the_right_to_see_nodes_the_fix_is_an_inventory_file() -> None:
    with pytest.raises(Forbidden, match="ada may not list nodes") as caught:
        hosts_for(said(refused=frozenset({"list nodes *"})), TABLE, cluster(1))
    assert caught.value.fix.startswith("ask\n  or set cluster.gpu to one of h100-sxm-80gb, ")
    assert caught.value.fix.endswith("or list the hosts with --inventory FILE")


def test_the_list_starts_again_if_a_page_expires() -> None:
    assert len(read_cluster(said(expired=1)).nodes) == 3


def test_nodes_without_the_resource_are_named_with_their_resources() -> None:
    item = node("n", allocatable={"amd.com/gpu": "8"})
    item["metadata"]["labels"] = {}
    api = FakeApi(objects={"nodes": [item]})
    with pytest.raises(PlanError, match=r"none of the 1 nodes has x.com/gpu; found: amd.com"):
        hosts_for(api, TABLE, cluster(1, gpu_resource="x.com/gpu"))


@pytest.mark.parametrize(
    ("labels", "message", "entry"),
    [
        (
            {"nvidia.com/gpu.product": "NVIDIA-X900"},
            "n has nvidia.com/gpu.product=NVIDIA-X900",
            'type: "nvidia-x900"',
        ),
        (
            {"node.kubernetes.io/instance-type": "G9.metal"},
            r"n has no label nvidia.com/gpu.product \(G9.metal\)",
            "feature: g9.metal",
        ),
    ],
)
def test_devices_that_no_table_knows_are_named_with_the_entry_to_write(
    labels: dict[str, str], message: str, entry: str, tmp_path: Path
) -> None:
    item = node("n")
    item["metadata"]["labels"] = labels
    api = FakeApi(objects={"nodes": [item]})
    with pytest.raises(PlanError, match=message) as caught:
        hosts_for(api, TABLE, cluster(1))
    assert entry in caught.value.fix
    own = tmp_path / "own.yaml"
    own.write_text(f"gpus: [{{{entry}, profile: h100-sxm-80gb}}]")
    table = gpu_table({"NDCTL_KUBERNETES_GPUS": str(own)})
    assert free(hosts_for(api, table, cluster(1))) == ["n"], (
        "the entry that the fix names must work"
    )


def test_without_a_spec_gpus_are_counted_or_else_cpus() -> None:
    assert usual(read_cluster(said())).device == GPU
    plain = node("n")
    for amounts in (plain["status"]["allocatable"], plain["status"]["capacity"]):
        amounts.pop(GPU, None)
    assert usual(read_cluster(FakeApi(objects={"nodes": [plain]}))).device is None


def topology(*labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": one} for one in labels]}}


@pytest.mark.parametrize(
    ("topologies", "levels"),
    [
        ([topology("block", RACK, "kubernetes.io/hostname")],) * 2,
        ([topology("block", RACK), topology("zone", RACK)], [topology(RACK)]),
        ([], [topology()]),
    ],
)
def test_only_levels_that_every_topology_of_kueue_has_are_used(
    topologies: list[dict[str, Any]], levels: list[dict[str, Any]]
) -> None:
    group = {"/apis/kueue.x-k8s.io": {"preferredVersion": {"version": "v1beta1"}}}
    api = FakeApi(objects={"topologies": topologies}, paths=group)
    assert kueue_levels(api) == tuple(one["nodeLabel"] for one in levels[0]["spec"]["levels"])


def test_unreadable_levels_of_kueue_are_not_taken_for_none() -> None:
    group = {"/apis/kueue.x-k8s.io": {"preferredVersion": {"version": "v1beta1"}}}
    refused = frozenset({"list topologies *"})
    assert kueue_levels(FakeApi(paths=group, refused=refused)) is None
    assert kueue_levels(FakeApi()) == (), "the cluster has no Kueue"
    down = {"/apis/kueue.x-k8s.io": Unanswered("down")}
    assert kueue_levels(FakeApi(paths=down)) is None


PEM = "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n"


class Named:
    def __init__(self, authority: str | None, server: str = "https://10.0.0.1:443") -> None:
        self.authority = None if authority is None else authority.encode()
        self.server = server


def test_a_clusters_identity_is_its_certificate_authority() -> None:
    one, two = PEM.format("QUJD"), PEM.format("REVG")
    outside = cluster_name(Named(one, "https://api.example.com:6443"))
    assert outside.startswith("kubernetes-")
    assert outside == cluster_name(Named(f"# a comment\n{one}\n"))
    assert cluster_name(Named(one + two)) == cluster_name(Named(two + one)) != outside
    assert cluster_name(Named(None, "https://api.example.com:6443")) == "kubernetes-api.example.com"

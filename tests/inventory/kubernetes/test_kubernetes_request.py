"""The topology that a plan requests for its pods."""

from typing import Any

import pytest

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory, Plan
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec, TopologyRequest
from orchestrator.inventory.kubernetes.gpus import gpu_table
from orchestrator.inventory.kubernetes.inventory import inventory_of, use_of
from orchestrator.inventory.kubernetes.nodes import parse_node
from orchestrator.inventory.kubernetes.request import Asked, request_of, requested
from tests.inventory.kubernetes.objects import node

RACK = "topology.kubernetes.io/rack"
BLOCK = "topology.kubernetes.io/block"
CLIQUE = "nvidia.com/gpu.clique"
PRODUCT = "nvidia.com/gpu.product"
A100 = {PRODUCT: "NVIDIA-A100-SXM4-80GB"}


def racks(**more: str) -> list[dict[str, Any]]:
    """16 nodes, 4 to a rack, 8 to a block and a clique."""
    return [
        node(f"n{i}", {BLOCK: f"b{i // 8}", RACK: f"r{i // 4}", CLIQUE: f"c.{i // 8}", **more})
        for i in range(16)
    ]


def plan(*hosts: str, tp: int = 1, profile: str | None = "h100-sxm-80gb") -> Plan:
    return Plan(
        mesh=Mesh(dp_shard=8 * len(hosts) // tp, tp=tp),
        micro_batch_size=1,
        gradient_accumulation=1,
        hosts=hosts,
        ranks_per_host=8,
        memory=Memory(peak_bytes=1, items={}),
        profile=profile,
    )


def ask(
    items: list[dict[str, Any]],
    made: Plan,
    spares: int = 0,
    kueue: tuple[str, ...] | None = None,
    **keys: Any,
) -> Asked:
    spec = KubernetesSpec(**keys)
    nodes = [parse_node(item) for item in items]
    use = use_of(ClusterSpec(hosts=len(made.hosts), gpus_per_host=8, kubernetes=spec))
    found = inventory_of(nodes, {}, gpu_table({}), use)
    return request_of(made, found, nodes, spec, spares=spares, kueue=kueue)


def test_without_kueue_pods_prefer_each_other_and_the_racks_of_the_plan() -> None:
    found = ask(racks(), plan("n0", "n1", "n4", "n5"))
    assert found == Asked(
        topology=TopologyRequest(levels=(BLOCK, RACK), prefer_nodes={RACK: ("r0", "r1")})
    )


def test_levels_with_one_common_value_are_not_requested() -> None:
    zone = {"topology.kubernetes.io/zone": "z"}
    assert ask(racks(**zone), plan("n0", "n1")).topology.levels == (BLOCK, RACK)
    assert ask(racks()[:4], plan("n0", "n1")).topology == TopologyRequest()


def test_a_plan_over_all_racks_prefers_none() -> None:
    found = ask(racks(), plan("n0", "n4", "n8", "n12"))
    assert found.topology == TopologyRequest(levels=(BLOCK, RACK))


def test_a_single_pod_requests_no_topology() -> None:
    assert ask(racks(), plan("n0")).topology == TopologyRequest()
    assert ask(racks(), plan("n0"), spares=1).topology.levels == (BLOCK, RACK)


@pytest.mark.parametrize(
    ("kueue", "preferred", "note"),
    [
        ((BLOCK, RACK, "kubernetes.io/hostname"), RACK, ""),
        ((BLOCK,), BLOCK, ""),
        (("cloud.com/rack",), None, f"its Topology has none of {BLOCK}, {RACK}"),
        ((), None, f"its Topology has none of {BLOCK}, {RACK}"),
        (None, None, "its Topology objects cannot be read"),
    ],
)
def test_kueue_is_asked_for_the_innermost_level_that_it_knows(
    kueue: tuple[str, ...] | None, preferred: str | None, note: str
) -> None:
    found = ask(racks(), plan("n0", "n1"), kueue=kueue, queue="training")
    assert found.topology.preferred == preferred
    assert [one.partition(": ")[2] for one in found.notes] == ([note] if note else [])


def test_tp_wider_than_a_host_in_one_block_requires_it() -> None:
    found = ask(racks(), plan("n0", "n1", tp=16)).topology
    assert (found.required, found.preferred, found.slice) == (CLIQUE, None, None)
    queued = ask(racks(), plan("n0", "n1", tp=16), kueue=(BLOCK, RACK, CLIQUE), queue="q").topology
    assert (queued.required, queued.preferred) == (CLIQUE, None)


@pytest.mark.parametrize(
    ("keys", "spares", "sliced"),
    [
        ({"kind": "jobset", "queue": "q", "kueue": (RACK, CLIQUE)}, 0, True),
        ({"kind": "trainjob", "queue": "q", "kueue": (RACK, CLIQUE)}, 2, True),
        ({"kind": "trainjob", "queue": "q", "kueue": (RACK, CLIQUE)}, 1, False),
        ({"kind": "pytorchjob", "queue": "q", "kueue": (RACK, CLIQUE)}, 0, False),
        ({"kind": "jobset", "queue": "q", "kueue": (RACK,)}, 0, False),
        ({"kind": "jobset"}, 0, False),
    ],
)
def test_tp_groups_become_slices_if_kueue_supports_them(
    keys: dict[str, Any], spares: int, sliced: bool
) -> None:
    found = ask(racks(), plan("n0", "n1", "n8", "n9", tp=16), spares=spares, **keys)
    asked = (found.topology.slice, found.topology.slice_size)
    assert asked == ((CLIQUE, 2) if sliced else (None, None))
    assert found.topology.required is None
    assert ["one NVLink block" in note for note in found.notes] == ([] if sliced else [True])


def test_nodes_with_other_devices_differ_in_their_product_label() -> None:
    items = [node("a"), node("b"), node("c", A100), node("d", A100)]
    found = ask(items, plan("a"))
    assert found.topology.nodes == {PRODUCT: ("NVIDIA-H100-80GB-HBM3",)}
    assert found.exclude == ()


def test_nodes_may_differ_in_provider_labels_or_only_in_names() -> None:
    kind = "node.kubernetes.io/instance-type"
    items = [node("a", {kind: "p5.48xlarge"}), node("b", {kind: "p4d.24xlarge"})]
    for item in items:
        del item["metadata"]["labels"][PRODUCT]
    assert ask(items, plan("a")).topology.nodes == {kind: ("p5.48xlarge",)}
    del items[1]["metadata"]["labels"][kind]
    assert ask(items, plan("a")).topology.nodes == {kind: ("p5.48xlarge",)}
    gke = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    mixed = [node("c", gke), *items, node("d", {kind: "p4d.24xlarge"})]
    del mixed[0]["metadata"]["labels"][PRODUCT], mixed[3]["metadata"]["labels"][PRODUCT]
    found = ask(mixed, plan("a", "c"))
    assert (found.topology.nodes, found.exclude) == ({}, ("b", "d")), "no label is on all of ours"


def test_nodes_with_too_few_devices_are_not_excluded() -> None:
    few = node("c", A100, {"nvidia.com/gpu": "4"})
    assert ask([node("a"), few], plan("a")).topology.nodes == {}


def test_topology_in_the_spec_wins() -> None:
    own = TopologyRequest(required=RACK)
    asked = Asked(topology=TopologyRequest(levels=(BLOCK,)), exclude=("b", "c"))
    said = requested(KubernetesSpec(topology=own, exclude=("a", "b")), asked)
    assert (said.topology, said.exclude) == (own, ("a", "b", "c"))
    assert requested(KubernetesSpec(), asked).topology == asked.topology

"""`ndctl inventory`, `plan` and `doctor` against a real API server."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import CoreV1Api

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.cluster_id import cluster_name
from orchestrator.backends.kubernetes.inventory import read_cluster
from orchestrator.backends.kubernetes.resources import PODS
from orchestrator.inventory.kubernetes.gpus import gpu_table
from orchestrator.inventory.kubernetes.inventory import Use
from orchestrator.system import SystemClock
from tests.e2e.job import SPEC as JOB
from tests.inventory.kubernetes.objects import GPU, container, node, pod
from tests.kubernetes.testbed import KubeTestbed
from tests.testbeds import run_within

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
NUM_NODES = 600
"""More than a page of 500."""


def api(kubeconfig: Path) -> Api:
    return Api(None, {"KUBECONFIG": str(kubeconfig)}, SystemClock())


def ndctl(kube: KubeTestbed, *args: str, kubeconfig: Path | None = None) -> tuple[int, str, str]:
    environ = {**kube.environ, "KUBECONFIG": str(kubeconfig or kube.kubeconfig)}
    done = run_within([sys.executable, "-m", "orchestrator", *args], environ, 240)
    return done.code, done.out, done.err


def inventory(kube: KubeTestbed, kubeconfig: Path | None = None) -> dict[str, Any]:
    args = ("inventory", "--backend", "kubernetes", "--json")
    code, out, err = ndctl(kube, *args, kubeconfig=kubeconfig)
    assert code == 0, err
    body: dict[str, Any] = json.loads(out)
    return body


def take_gpus(
    kube: KubeTestbed, name: str, node_name: str, gpus: int, namespace: str = "default"
) -> None:
    """Creates a pod that is bound to a node and takes GPUs of it."""
    amounts = {"limits": {GPU: str(gpus)}}
    one = {"name": "c", "image": "none", "command": ["sleep", "600"], "resources": amounts}
    item = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    kube.apply({**item, "spec": {"nodeName": node_name, "containers": [one]}}, namespace=namespace)


def test_nodes_are_read_with_devices_state_and_switches(kube: KubeTestbed) -> None:
    take_gpus(kube, "all", "node1", 2)
    take_gpus(kube, "half", "node2", 1)
    kube.kubectl("cordon", "node3")
    kube.wait_for("its taint", lambda: kube.get("nodes", "node3")["spec"].get("taints"))
    body = inventory(kube)
    assert body["notes"] == []
    found = {host["name"]: host for host in body["hosts"]}
    assert {name: (one["state"], one["reason"], one["devices"]) for name, one in found.items()} == {
        "node1": ("busy", f"2 of 2 {GPU} taken by default/all", 2),
        "node2": ("free", "", 1),
        "node3": ("cordoned", "", 2),
        "node4": ("free", "", 2),
    }
    assert found["node1"]["switches"] == ["zone1", "block1", "rack1"]
    assert found["node3"]["switches"] == ["zone1", "block1", "rack2"]
    assert {one["profile"] for one in found.values()} == {"h100-sxm-80gb"}
    code, out, _ = ndctl(kube, "inventory", "--backend", "kubernetes")
    assert (code, "node3  cordoned" in out) == (0, True)


def test_a_plan_uses_free_hosts_and_notes_what_waits(kube: KubeTestbed) -> None:
    def plan(hosts: int) -> dict[str, Any]:
        files = f"data.files={Path(json.__file__).parent}/*.py"
        keys = (f"cluster.hosts={hosts}", "cluster.gpus_per_host=2", "train.global_batch_size=24")
        sets = [f"--set={key}" for key in (*keys, files)]
        code, out, err = ndctl(kube, "plan", str(JOB), "--backend", "kubernetes", "--json", *sets)
        assert code == 0, err
        body: dict[str, Any] = json.loads(out)
        return body

    take_gpus(kube, "other", "node1", 2)
    assert set(plan(2)["hosts"]) == {"node3", "node4"}, "hosts of one rack"
    assert not [note for note in plan(3)["notes"] if "free now" in note]
    everything = plan(4)
    assert set(everything["hosts"]) == {"node1", "node2", "node3", "node4"}
    assert [note for note in everything["notes"] if note.startswith("3 of the 4 hosts are free")]


def test_a_users_missing_rights_are_named(kube: KubeTestbed) -> None:
    take_gpus(kube, "mine", "node1", 2)
    take_gpus(kube, "theirs", "node2", 2, namespace=kube.namespace("others"))
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    dev = kube.as_user([pods])
    code, _, err = ndctl(kube, "inventory", "--backend", "kubernetes", kubeconfig=dev)
    assert code == 6
    assert "dev may not list nodes" in err
    assert "kubectl create clusterrole ndctl-list-nodes" in err
    role = ("clusterrole", "ndctl-list-nodes", "--verb=get,list,watch", "--resource=nodes")
    kube.kubectl("create", *role)  # The error message says to type this.
    bound = ("clusterrolebinding", "ndctl-list-nodes", "--clusterrole=ndctl-list-nodes")
    kube.kubectl("create", *bound, "--user=dev")
    try:
        kube.wait_for(
            "the right",
            lambda: ndctl(kube, "inventory", "--backend", "kubernetes", kubeconfig=dev)[0] == 0,
        )
        body = inventory(kube, dev)
    finally:
        kube.kubectl("delete", "clusterrole,clusterrolebinding", "ndctl-list-nodes")
    states = {host["name"]: host["state"] for host in body["hosts"]}
    assert (states["node1"], states["node2"]) == ("busy", "free")
    assert body["notes"] == [
        "dev may not list pods: the usage of pods in other namespaces is unknown, so"
        " only devices used by pods of default are excluded"
    ]


def test_doctor_works_for_the_admin_and_for_a_user_without_rights(kube: KubeTestbed) -> None:
    def doctor(kubeconfig: Path | None = None) -> dict[str, dict[str, str]]:
        args = ("doctor", "--backend", "kubernetes", "--json")
        _, out, _ = ndctl(kube, *args, kubeconfig=kubeconfig)
        return {one["what"]: one for one in json.loads(out)["findings"]}

    found = doctor()
    for what in ("api server", "pytorchjob", "jobset", "trainjob", "namespace", "rights", "nodes"):
        assert found[what]["verdict"] == "ok", found[what]
    pods = {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["list"]}
    refused = doctor(kube.as_user([pods]))
    assert refused["rights"]["verdict"] == "stops"
    (verbs,) = re.findall(r" ([a-z/]+) pods,", refused["rights"]["found"])
    assert set(verbs.split("/")) == {"get", "watch", "delete", "deletecollection"}
    assert re.findall(r" ([a-z/]+) events,", refused["rights"]["found"]) == ["create"]
    assert refused["cluster rights"]["verdict"] == "warns"


@pytest.fixture
def many_nodes(kube: KubeTestbed) -> Iterator[KubeTestbed]:
    """The cluster with many more nodes; all GPUs of every tenth are taken."""
    admin = api(kube.kubeconfig)
    namespace = kube.namespace("crowd")
    for number in range(NUM_NODES):
        name, labels = (
            f"many-{number}",
            {"many": "yes", "topology.kubernetes.io/rack": f"r{number // 16}"},
        )
        admin.create({"apiVersion": "v1", "kind": "Node", **node(name, labels)}, "")
        if number % 10 == 0:
            one = {"name": "c", "image": "none", **container(gpu="8")}
            one["resources"]["limits"] = one["resources"]["requests"]
            item = {"apiVersion": "v1", "kind": "Pod", **pod(name, one, name=name)}
            item["metadata"] = {"name": name}
            del item["status"]
            admin.create(item, namespace)
    yield kube
    admin.delete_all(PODS, namespace, labels="")
    kube.kubectl("delete", "nodes", "-l", "many=yes", "--wait=false", timeout=120)
    kube.wait_for("no such node", lambda: not kube.objects("nodes", selector="many=yes"))


@pytest.mark.slow
def test_hundreds_of_nodes_are_read_in_a_few_requests(many_nodes: KubeTestbed) -> None:
    reader = api(many_nodes.kubeconfig)
    seen = read_cluster(reader)
    assert reader.requests <= 5, "nodes in pages of 500, and pods"
    found = seen.inventory(gpu_table({}), Use())
    crowd = [host for host in found.hosts if host.name.startswith("many-")]
    assert len(crowd) == NUM_NODES
    # Other new nodes may still be not ready or tainted, so only the busy ones are compared.
    busy = {host.name for host in crowd if host.state == "busy"}
    assert busy == {f"many-{number}" for number in range(0, NUM_NODES, 10)}


def test_ended_pods_are_not_requested(kube: KubeTestbed) -> None:
    take_gpus(kube, "over", "node1", 2)
    core = CoreV1Api(kube.client)
    kube.wait_for("it to run", lambda: kube.phases()["over"] != "Pending")
    core.patch_namespaced_pod_status("over", "default", {"status": {"phase": "Succeeded"}})
    kube.wait_for("it to have ended", lambda: kube.phases()["over"] == "Succeeded")
    seen = read_cluster(api(kube.kubeconfig))
    assert "node1" not in seen.used


def test_a_cluster_has_one_name_for_all_its_users(kube: KubeTestbed) -> None:
    admin = cluster_name(api(kube.kubeconfig).access)
    assert admin == cluster_name(api(kube.as_user([])).access)
    assert len(admin) == len("kubernetes-") + 8

"""Doctor on Kubernetes, with the answers of healthy and of broken API servers."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec, RunVolume
from orchestrator.doctor.kubernetes import Job, examine_kubernetes
from orchestrator.errors import Unanswered
from orchestrator.inventory.kubernetes.gpus import gpu_table
from tests.backends.kubernetes.fake_api import FakeApi
from tests.backends.kubernetes.rendered import PLAIN, a_handover
from tests.inventory.kubernetes.objects import node

SPEC = replace(PLAIN, gang_scheduler=None)


def served(group: str, version: str, plural: str) -> dict[str, Any]:
    return {
        f"/apis/{group}": {
            "versions": [{"version": version}],
            "preferredVersion": {"version": version},
        },
        f"/apis/{group}/{version}": {"resources": [{"name": plural}]},
    }


PATHS = {
    "/version": {"gitVersion": "v1.33.1"},
    **served("kubeflow.org", "v1", "pytorchjobs"),
    **served("jobset.x-k8s.io", "v1alpha2", "jobsets"),
}
KUEUE = served("kueue.x-k8s.io", "v1beta1", "localqueues")


def claim(*modes: str, phase: str = "Bound") -> dict[str, Any]:
    return {
        "metadata": {"name": "runs"},
        "spec": {"accessModes": list(modes)},
        "status": {"phase": phase},
    }


def healthy(**more: Any) -> FakeApi:
    objects = {
        "namespaces": [{"metadata": {"name": "team-a"}, "status": {"phase": "Active"}}],
        "serviceaccounts": [{"metadata": {"name": "site"}}],
        "persistentvolumeclaims": [claim("ReadWriteMany")],
        "nodes": [node("n0"), node("n1", unschedulable=True)],
        "leases": [{"metadata": {"name": "ndctl-controller"}, "spec": {"holderIdentity": "pod-1"}}],
    }
    return FakeApi(
        objects=objects | more.pop("objects", {}), paths=PATHS | more.pop("paths", {}), **more
    )


def job(spec: KubernetesSpec = SPEC, hosts: int = 2) -> Job:
    return Job(a_handover(spec, spec.kind, hosts), gpu_table({}))


def look(what: str, api: FakeApi, spec: KubernetesSpec = SPEC, hosts: int | None = 2) -> Finding:
    """The finding about `what` for a job on `hosts` hosts. Without a job if `hosts` is None."""
    found = examine_kubernetes(api, spec, None if hosts is None else job(spec, hosts))
    return next(one for one in found if one.what == what)


def test_a_healthy_cluster_has_no_problem() -> None:
    found = examine_kubernetes(healthy(), SPEC, job(hosts=1))
    assert {one.what: one.verdict for one in found} == {
        "api server": "ok",
        "pytorchjob": "ok",
        "jobset": "ok",
        "trainjob": "note",
        "namespace": "ok",
        "rights": "ok",
        "cluster rights": "ok",
        "controller": "ok",
        "dry run": "ok",
        "run volume": "ok",
        "nodes": "ok",
    }
    assert look("api server", healthy()).found == (
        "Kubernetes v1.33.1 at https://10.0.0.1:6443, context prod"
    )
    without = {one.what: one.verdict for one in examine_kubernetes(healthy(), KubernetesSpec())}
    assert without["nodes"] == "ok"
    assert look("nodes", healthy(), hosts=None).found == (
        "1 of 2 nodes with nvidia.com/gpu accept pods; 2 nodes in total"
    )


def test_an_unreachable_api_server_is_the_only_finding() -> None:
    down = FakeApi(paths={"/version": Unanswered("no answer", fix="wait")})
    (found,) = examine_kubernetes(down, SPEC, job())
    assert (found.what, found.verdict, found.found, found.fix) == (
        "api server", "stops", "no answer", "wait",
    )  # fmt: skip


def test_the_requested_kind_must_exist_in_the_supported_version() -> None:
    missing = look("trainjob", healthy(), replace(SPEC, kind="trainjob"))
    assert missing.verdict == "stops"
    assert "Kubeflow Trainer v2 is not installed" in missing.found
    assert "kubectl apply" in missing.fix
    newer = served("jobset.x-k8s.io", "v2", "jobsets")
    api = FakeApi(objects=healthy().objects, paths=PATHS | newer)
    found = look("jobset", api, replace(SPEC, kind="jobset"))
    assert found.found.startswith("served as jobsets.jobset.x-k8s.io v2")
    assert "needs 0.6 or newer, with v1alpha2" in found.found


def insists(level: str) -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": level}
    return {"metadata": {"name": "team-a", "labels": labels}, "status": {"phase": "Active"}}


def patched(**pod: Any) -> KubernetesSpec:
    return replace(SPEC, pod_template={"spec": pod})


HOST_PATH = replace(SPEC, runs=RunVolume(host_path="/runs"))


@pytest.mark.parametrize(
    ("level", "spec", "hosts", "verdict", "words"),
    [
        ("restricted", SPEC, 2, "warns", "init container"),
        ("restricted", SPEC, 1, "ok", "meet the standard restricted"),
        ("restricted", replace(SPEC, kind="jobset"), 2, "ok", "restricted"),
        ("baseline", SPEC, 2, "ok", "baseline"),
    ],
)
def test_a_pod_security_standard_is_reported(
    level: str, spec: KubernetesSpec, hosts: int, verdict: str, words: str
) -> None:
    found = look("pod security", healthy(objects={"namespaces": [insists(level)]}), spec, hosts)
    assert found.verdict == verdict
    assert words in found.found
    assert verdict == "ok" or "kubectl label namespace team-a --overwrite" in found.fix


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        (HOST_PATH, "runs.host_path"),
        (replace(SPEC, host_network=True), "host_network"),
        (replace(SPEC, rdma_resource="rdma/hca"), "rdma_resource"),
        (patched(hostIPC=True), "pod_template.spec.hostIPC"),
        (
            patched(volumes=[{"name": "e"}, {"name": "d", "hostPath": {"path": "/d"}}]),
            "pod_template.spec.volumes[1].hostPath",
        ),
        (
            patched(containers=[{"name": "c", "securityContext": {"privileged": True}}]),
            "pod_template.spec.containers[0].securityContext.privileged",
        ),
        (
            patched(
                initContainers=[
                    {"name": "i", "securityContext": {"capabilities": {"add": ["KILL", "BPF"]}}}
                ]
            ),
            "pod_template.spec.initContainers[0].securityContext.capabilities.add",
        ),
        (
            patched(containers=[{"name": "c", "ports": [{"hostPort": 80}]}]),
            "pod_template.spec.containers[0].ports[0].hostPort",
        ),
    ],
)
def test_a_key_that_would_keep_pods_out_is_named(spec: KubernetesSpec, key: str) -> None:
    api = healthy(objects={"namespaces": [insists("baseline")]})
    found = look(f"cluster.kubernetes.{key}", api, spec)
    assert found.verdict == "stops"
    assert "must be unset: pods of namespace team-a must meet the standard baseline" in (
        found.found
    )
    assert "kubectl label namespace team-a --overwrite" in found.fix


def test_missing_rights_are_listed_in_the_form_of_a_role() -> None:
    refused = frozenset({"create secrets", "patch configmaps", "create pods/exec"})
    found = look("rights", healthy(refused=refused))
    assert found.verdict == "stops"
    assert found.found == (
        "ada may not patch configmaps, create secrets, create pods/exec in team-a"
    )
    assert found.fix.endswith(
        'rules: [{apiGroups: [""], resources: [configmaps], verbs: [patch]},'
        ' {apiGroups: [""], resources: [secrets, pods/exec], verbs: [create]}]'
    )
    assert look("rights", healthy(refused=frozenset({"create pods/exec"}))).verdict == "warns"
    again = look("rights", healthy(refused=frozenset({"delete pytorchjobs"})))
    assert again.verdict == "warns"
    assert again.found.endswith("in team-a: `submit --resume` and --new are refused")
    refused = frozenset({"create roles", "patch pods/status"})
    found = look("rights", healthy(refused=refused))
    assert found.found == "ada may not create roles.rbac.authorization.k8s.io in team-a"
    assert (
        look("rights", healthy(refused=refused), replace(SPEC, service_account="a")).verdict == "ok"
    )
    refused = frozenset({"create networkpolicies"})
    assert look("rights", healthy(refused=refused)).verdict == "stops"
    for spec in (replace(SPEC, network_policy=False), replace(SPEC, host_network=True)):
        assert look("rights", healthy(refused=refused), spec).verdict == "ok"
    blind = healthy(refused=frozenset({"list pods *", "list nodes *"}))
    wide = look("cluster rights", blind, hosts=None)
    assert wide.found == "you may not list nodes or list pods in the whole cluster"
    assert wide.verdict == "warns"
    assert "set cluster.gpu to one of h100-sxm-80gb," in wide.fix
    assert look("cluster rights", blind).verdict == "note", "the job has a plan all the same"
    assert look("nodes", blind).verdict == "note"


@pytest.mark.parametrize(
    ("kind", "leases", "verdict", "words"),
    [
        ("pytorchjob", [], "note", "new pods may be scheduled on a node that a job excluded"),
        ("jobset", [], "warns", "stay until a person deletes them"),
        ("trainjob", [{"metadata": {"name": "ndctl-controller"}, "spec": {}}], "warns", "none"),
    ],
)
def test_missing_functions_without_a_controller_are_reported(
    kind: Kind, leases: list[Any], verdict: str, words: str
) -> None:
    found = look("controller", healthy(objects={"leases": leases}), replace(SPEC, kind=kind))
    assert found.verdict == verdict
    assert words in found.found
    assert "`kubectl apply -k manifests/controller`" in found.fix
    hidden = look("controller", healthy(refused=frozenset({"get leases"})))
    assert (hidden.verdict, "not allowed to check" in hidden.found) == ("note", True)


@pytest.mark.parametrize(
    ("what", "objects", "verdict", "words"),
    [
        ("namespace", {"namespaces": []}, "stops", "there is no namespace team-a"),
        (
            "namespace",
            {"namespaces": [{"metadata": {"name": "team-a"}, "status": {"phase": "Terminating"}}]},
            "stops",
            "team-a is Terminating",
        ),
        (
            "run volume",
            {"persistentvolumeclaims": [claim("ReadWriteOnce")]},
            "stops",
            "runs is Bound, ReadWriteOnce; 2 hosts write",
        ),
        (
            "run volume",
            {"persistentvolumeclaims": [claim("ReadWriteMany", phase="Pending")]},
            "note",
            "runs is Pending, ReadWriteMany",
        ),
        (
            "run volume",
            {"persistentvolumeclaims": [claim("ReadWriteMany", phase="Lost")]},
            "stops",
            "runs is Lost, ReadWriteMany",
        ),
        (
            "nodes",
            {"nodes": []},
            "warns",
            "0 of the 2 nodes with 8 nvidia.com/gpu that the job needs exist; its pods wait"
            " until more exist",
        ),
        (
            "nodes",
            {"nodes": [node("a"), node("n", unschedulable=True), node("o", {"x": "y"})]},
            "ok",
            "2 nodes with 8 nvidia.com/gpu fit; the job uses 2",
        ),
        (
            "nodes",
            {"nodes": [node("n", unschedulable=True), node("o", {}, {"nvidia.com/gpu": "4"})]},
            "warns",
            "0 of the 2 nodes with 8 nvidia.com/gpu that the job needs exist; its pods wait"
            " until more exist (n is cordoned; o has 4 of 8 devices)",
        ),
    ],
)
def test_missing_objects_of_a_job_are_reported(
    what: str, objects: dict[str, Any], verdict: str, words: str
) -> None:
    found = look(what, healthy(objects=objects))
    assert (found.verdict, found.found) == (verdict, words)
    assert found.fix or verdict in ("note", "ok")


def test_missing_objects_of_a_spec_are_reported() -> None:
    spec = replace(
        SPEC,
        service_account="other",
        priority_class="high",
        image_pull_secrets=("registry",),
        runs=RunVolume(claim="nowhere"),
    )
    found = {one.what: one for one in examine_kubernetes(healthy(), spec, job(spec))}
    for key, words, fix in (
        (
            "service_account",
            "must be a ServiceAccount of namespace team-a; other does not exist",
            "",
        ),
        ("priority_class", "must be a PriorityClass of the cluster; high does not exist", ""),
        (
            "image_pull_secrets[0]",
            "must be a Secret of namespace team-a; registry does not exist",
            "kubectl -n team-a create secret docker-registry registry",
        ),
        (
            "runs.claim",
            "must be a PersistentVolumeClaim of namespace team-a; nowhere does not exist",
            "kubectl -n team-a get pvc",
        ),
    ):
        one = found[f"cluster.kubernetes.{key}"]
        assert (one.verdict, one.found) == ("stops", words)
        assert fix in one.fix


def test_a_claim_for_one_node_serves_only_one_host() -> None:
    api = healthy(objects={"persistentvolumeclaims": [claim("ReadWriteOnce")]})
    assert look("run volume", api, hosts=1).verdict == "ok"


def test_a_forbidden_request_does_not_stop_other_checks() -> None:
    hidden = {"get namespaces *", "get serviceaccounts", "get persistentvolumeclaims"}
    api = healthy(refused=frozenset(hidden | {"list nodes *", "list resourcequotas"}))
    spec = replace(SPEC, service_account="site")
    found = {one.what: one.verdict for one in examine_kubernetes(api, spec, job(spec))}
    assert found["namespace"] == "note"
    assert found["nodes"] == "note"
    assert "stops" not in found.values()
    assert look("service account", api, spec, hosts=None).verdict == "note"


def test_another_resource_is_proposed_if_no_node_has_the_specs() -> None:
    amd = node("n", allocatable={"amd.com/gpu": "8"})
    del amd["status"]["allocatable"]["nvidia.com/gpu"]
    assert look("nodes", healthy(objects={"nodes": [amd]}), hosts=None).fix.startswith(
        "set cluster.kubernetes.gpu_resource to one of amd.com/gpu, or to null"
    )


def test_problems_of_the_spec_are_in_the_same_list() -> None:
    spec = KubernetesSpec(priority_class="high", pod_template={"spec": {"nodename": "n1"}})
    found = examine_kubernetes(healthy(), spec, job(spec))
    stops = {one.what for one in found if one.verdict == "stops"}
    assert stops == {
        "cluster.kubernetes.image",
        "cluster.kubernetes.runs",
        "cluster.kubernetes.pod_template.spec.nodename",
        "cluster.kubernetes.priority_class",
    }


@pytest.mark.parametrize(
    ("queue", "paths", "queues", "verdict", "words"),
    [
        (None, KUEUE, [], "note", "Kueue v1beta1 is installed; no cluster.kubernetes.queue is set"),
        ("train", {}, [], "stops", "cluster.kubernetes.queue=train, but Kueue is not installed"),
        ("train", KUEUE, [], "stops", "there is no train in team-a"),
        ("train", KUEUE, [{"metadata": {"name": "train"}}], "ok", "train"),
    ],
)
def test_the_queue(
    queue: str | None, paths: Any, queues: list[Any], verdict: str, words: str
) -> None:
    api = healthy(paths=paths, objects={"localqueues": queues})
    found = look("queue", api, replace(SPEC, queue=queue))
    assert (found.verdict, found.found) == (verdict, words)

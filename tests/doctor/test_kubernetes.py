"""A cluster's answers, as an API server that is in order gives them, and in less order."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.contract.findings import Finding
from orchestrator.contract.kubernetes import KubernetesSpec, RunVolume
from orchestrator.doctor.kubernetes import examine_kubernetes
from orchestrator.errors import Unanswered
from tests.backends.kubernetes.said_before import SaidBefore
from tests.cluster.kubernetes.objects import node

SPEC = KubernetesSpec(image="ndctl:1", runs=RunVolume(claim="runs"))


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


def sound(**more: Any) -> SaidBefore:
    objects = {
        "namespaces": [{"metadata": {"name": "team-a"}, "status": {"phase": "Active"}}],
        "serviceaccounts": [{"metadata": {"name": "site"}}],
        "persistentvolumeclaims": [claim("ReadWriteMany")],
        "nodes": [node("n0"), node("n1", unschedulable=True)],
    }
    return SaidBefore(
        objects=objects | more.pop("objects", {}), paths=PATHS | more.pop("paths", {}), **more
    )


def look(what: str, api: SaidBefore, spec: KubernetesSpec = SPEC, hosts: int | None = 2) -> Finding:
    return next(one for one in examine_kubernetes(api, spec, hosts) if one.what == what)


def test_a_sound_cluster_stops_nothing() -> None:
    found = examine_kubernetes(sound(), SPEC, 2)
    assert {one.what: one.verdict for one in found} == {
        "api server": "ok",
        "pytorchjob": "ok",
        "jobset": "ok",
        "trainjob": "note",
        "namespace": "ok",
        "rights": "ok",
        "run volume": "ok",
        "nodes": "ok",
    }
    assert look("api server", sound()).found == (
        "Kubernetes v1.33.1 at https://10.0.0.1:6443, context prod"
    )
    assert look("nodes", sound()).found == ("1 of 2 with nvidia.com/gpu take pods, of 2 nodes")


def test_an_api_server_that_does_not_answer_is_all_there_is_to_say() -> None:
    down = SaidBefore(paths={"/version": Unanswered("no answer", fix="wait")})
    (found,) = examine_kubernetes(down, SPEC, 2)
    assert (found.what, found.verdict, found.found, found.fix) == (
        "api server", "stops", "no answer", "wait",
    )  # fmt: skip


def test_the_kind_that_is_asked_for_has_to_be_there_in_our_version() -> None:
    missing = look("trainjob", sound(), KubernetesSpec(kind="trainjob"))
    assert missing.verdict == "stops"
    assert "Kubeflow Trainer v2 is not installed" in missing.found
    assert "kubectl apply" in missing.fix
    newer = served("jobset.x-k8s.io", "v2", "jobsets")
    api = SaidBefore(objects=sound().objects, paths=PATHS | newer)
    found = look("jobset", api, KubernetesSpec(kind="jobset"))
    assert found.found.startswith("served as jobsets.jobset.x-k8s.io v2")
    assert "needs v1alpha2" in found.found


def insists(level: str) -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": level}
    return {"metadata": {"name": "team-a", "labels": labels}, "status": {"phase": "Active"}}


HOST_PATH = KubernetesSpec(image="ndctl:1", runs=RunVolume(host_path="/runs"))


@pytest.mark.parametrize(
    ("level", "spec", "hosts", "verdict", "words"),
    [
        ("restricted", SPEC, 2, "warns", "init container"),
        ("restricted", SPEC, 1, "ok", "keep to the standard restricted"),
        ("restricted", replace(SPEC, kind="jobset"), 2, "ok", "restricted"),
        ("baseline", SPEC, 2, "ok", "baseline"),
        ("baseline", HOST_PATH, 2, "stops", "forbids cluster.kubernetes.runs.host_path"),
        ("baseline", replace(SPEC, host_network=True), 2, "stops", "host_network"),
        ("restricted", replace(SPEC, rdma_resource="rdma/hca"), 2, "stops", "rdma_resource"),
    ],
)
def test_a_standard_that_would_keep_pods_out_is_said(
    level: str, spec: KubernetesSpec, hosts: int, verdict: str, words: str
) -> None:
    found = look("pod security", sound(objects={"namespaces": [insists(level)]}), spec, hosts)
    assert found.verdict == verdict
    assert words in found.found
    assert verdict == "ok" or "kubectl label namespace team-a --overwrite" in found.fix


def test_rights_that_are_missing_are_said_as_a_role_takes_them() -> None:
    refused = frozenset({"create secrets", "patch secrets", "create pods/exec"})
    found = look("rights", sound(refused=refused))
    assert found.verdict == "stops"
    assert found.found == "you may not create/patch secrets, create pods/exec in team-a"
    assert found.fix.endswith(
        'rules: [{apiGroups: [""], resources: [secrets], verbs: [create, patch]},'
        ' {apiGroups: [""], resources: [pods/exec], verbs: [create]}]'
    )
    assert look("rights", sound(refused=frozenset({"create pods/exec"}))).verdict == "warns"
    refused = frozenset({"create roles", "patch pods/status"})
    found = look("rights", sound(refused=refused))
    assert found.found == "you may not create roles.rbac.authorization.k8s.io in team-a"
    assert (
        look("rights", sound(refused=refused), replace(SPEC, service_account="a")).verdict == "ok"
    )
    wide = look("cluster rights", sound(refused=frozenset({"list pods *", "list nodes *"})))
    assert wide.found == "you may not list nodes or list pods of the whole cluster"


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
        ("service account", {"serviceaccounts": []}, "stops", "there is no site in team-a"),
        ("run volume", {"persistentvolumeclaims": []}, "stops", "there is no runs in team-a"),
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
        ("nodes", {"nodes": []}, "stops", "0 of 0 with nvidia.com/gpu take pods, of 0 nodes"),
        (
            "nodes",
            {"nodes": [node("n", unschedulable=True)]},
            "stops",
            "0 of 1 with nvidia.com/gpu take pods, of 1 nodes",
        ),
    ],
)
def test_what_a_job_needs_has_to_be_there(
    what: str, objects: dict[str, Any], verdict: str, words: str
) -> None:
    found = look(what, sound(objects=objects), replace(SPEC, service_account="site"))
    assert (found.verdict, found.found) == (verdict, words)
    assert found.fix or verdict != "stops"


def test_one_host_writes_to_a_claim_of_one_node() -> None:
    api = sound(objects={"persistentvolumeclaims": [claim("ReadWriteOnce")]})
    assert look("run volume", api, hosts=1).verdict == "ok"


def test_what_may_not_be_asked_is_a_note() -> None:
    refused = {"get namespaces *", "get serviceaccounts", "get persistentvolumeclaims"}
    api = sound(refused=frozenset(refused | {"list nodes *"}))
    for what in ("namespace", "service account", "run volume", "nodes"):
        spec = replace(SPEC, service_account="site")
        assert look(what, api, spec).verdict == "note", what


def test_another_resource_is_named_where_no_node_has_ours() -> None:
    amd = node("n", allocatable={"amd.com/gpu": "8"})
    del amd["status"]["allocatable"]["nvidia.com/gpu"]
    assert look("nodes", sound(objects={"nodes": [amd]})).fix == (
        "set cluster.kubernetes.gpu_resource to one of amd.com/gpu, or to null"
    )


def test_a_spec_without_image_or_volume_or_with_names_that_are_not_there() -> None:
    spec = KubernetesSpec(priority_class="high", image_pull_secrets=("registry",))
    found = {one.what: one for one in examine_kubernetes(sound(), spec, 2)}
    for what in ("image", "run volume", "priority class", "pull secret"):
        assert found[what].verdict == "stops", what
        assert found[what].fix
    without = {one.what for one in examine_kubernetes(sound(), spec)}
    assert not without & {"image", "run volume", "priority class", "pull secret"}


@pytest.mark.parametrize(
    ("queue", "paths", "queues", "verdict", "words"),
    [
        (None, KUEUE, [], "note", "Kueue v1beta1 is there; no cluster.kubernetes.queue is set"),
        ("train", {}, [], "stops", "cluster.kubernetes.queue=train, and there is no Kueue"),
        ("train", KUEUE, [], "stops", "there is no train in team-a"),
        ("train", KUEUE, [{"metadata": {"name": "train"}}], "ok", "train"),
    ],
)
def test_the_queue(
    queue: str | None, paths: Any, queues: list[Any], verdict: str, words: str
) -> None:
    api = sound(paths=paths, objects={"localqueues": queues})
    found = look("queue", api, KubernetesSpec(queue=queue))
    assert (found.verdict, found.found) == (verdict, words)

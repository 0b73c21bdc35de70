"""Checks of `submit`, its dry run and `doctor` before any object is created, on a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.mirror.find_mirrors import mirrors_at, seek_mirror
from orchestrator.contract.files import exit_codes
from orchestrator.errors import JobError
from orchestrator.system import SystemClock
from tests.e2e.job import CommandResult
from tests.kubernetes.e2e.person import SLEEPS, Person, account, advised
from tests.kubernetes.testbed import REPOSITORY, KubeTestbed

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
GPU = {"cluster__gpu": "h100-sxm-80gb", "gpu_resource": "nvidia.com/gpu"}
CRD = "pytorchjobs.kubeflow.org"


@pytest.fixture
def admin(kube: KubeTestbed, tmp_path: Path) -> Person:
    """The admin of a cluster whose quota allows no pod: the tests look at objects only."""
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "still"},
            "spec": {"hard": {"count/pods.v1": "0"}},
        }
    )
    account(kube)
    return Person(tmp_path / "runs", kube)


@pytest.mark.parametrize(
    ("kind", "resource", "container"),
    [("pytorchjob", "pytorchjobs", "pytorch"), ("jobset", "jobsets", "pytorch")],
)
def test_an_ended_job_is_deleted_with_all_its_objects(
    kube: KubeTestbed, tmp_path: Path, kind: str, resource: str, container: str
) -> None:
    account(kube)
    ends = f"{{spec: {{containers: [{{name: {container}, command: [sh, -c, 'exit 0']}}]}}}}"
    person = Person(tmp_path / "runs", kube)
    person.submit_successfully(kind=kind, pod_template=ends, ttl_after_finished="0")

    def left() -> list[dict[str, Any]]:
        kinds = (resource, "configmaps", "secrets", "pods")
        return [one for each in kinds for one in kube.objects(each, selector="ndctl.dev/job=e2e")]

    kube.wait_for("nothing of it", lambda: not left())


@pytest.fixture
def namespace_user(kube: KubeTestbed, tmp_path: Path) -> Iterator[Person]:
    """A user with exactly the rights of the Role `ndctl-user` in one namespace."""
    kube.kubectl("apply", "-k", str(REPOSITORY / "manifests" / "overlays" / "rdma"))
    role = kube.kubectl("-n", "ndctl", "get", "role", "ndctl-user", "-o", "json")
    kubeconfig = kube.as_user(json.loads(role)["rules"], "ndctl")
    account(kube, "ndctl")
    yield Person(tmp_path / "runs", kube, "ndctl", kubeconfig)
    kube.kubectl("-n", "ndctl", "delete", "pytorchjobs", "--all", "--wait=false")


def findings(person: Person, **options: str) -> dict[str, dict[str, str]]:
    words = [one for one in person.words(**options) if not one.startswith("--backend")]
    done = person("doctor", *words, "--backend=kubernetes", "--json")
    return {one["what"]: one for one in json.loads(done.out)["findings"]}


def error_lines(done: CommandResult) -> list[str]:
    return [line.strip() for line in done.err.splitlines()]


def test_a_user_who_may_not_see_nodes_can_submit_and_doctor_agrees(namespace_user: Person) -> None:
    refused = namespace_user.submit(gpu_resource="nvidia.com/gpu")
    assert refused.code == exit_codes.BACKEND
    assert "may not list nodes" in refused.err
    assert "set cluster.gpu to one of h100-sxm-80gb" in refused.err
    assert findings(namespace_user, gpu_resource="nvidia.com/gpu")["plan"]["verdict"] == "stops"

    found = findings(namespace_user, **GPU, pod_template=SLEEPS)
    assert not [one for one in found.values() if one["verdict"] == "stops"], found
    assert found["nodes"]["verdict"] == "note"
    tried = namespace_user.submit("--dry-run", **GPU, pod_template=SLEEPS)
    assert tried.code == 0, tried.err
    assert "# nodes: unknown, and not required" in tried.out
    namespace_user.submit_successfully(**GPU, pod_template=SLEEPS)
    assert namespace_user.job() is not None


def test_a_job_for_a_pool_that_scales_from_zero_is_submitted_with_a_warning(admin: Person) -> None:
    pool = {"node_selector": "{cloud.google.com/gke-accelerator: nvidia-h100-80gb}"}
    done = admin.submit(gpu_resource="nvidia.com/gpu", pod_template=SLEEPS, **pool)
    assert done.code == 0, done.err
    assert "warning: nodes: 0 of the 2 nodes with 2 nvidia.com/gpu that the job needs" in done.err
    label = "without the label cloud.google.com/gke-accelerator=nvidia-h100-80gb"
    assert f"node1 is not selected ({label})" in done.err
    job = admin.job()
    assert job is not None
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert "nodeAffinity" not in pod["affinity"], "no affinity to the nodes that exist now"


def test_render_prints_what_submit_sends_and_makes_no_request(admin: Person) -> None:
    text = admin.render(**GPU)
    nowhere = Person(admin.run_root, admin.kube, kubeconfig=Path("/nowhere/kubeconfig"))
    assert nowhere.render(**GPU) == text
    client = nowhere.submit("--dry-run=client", **GPU)
    assert client.code == 0, client.err
    assert client.out.endswith(text)
    server = admin.submit("--dry-run=server", **GPU)
    assert server.code == 0, server.err
    assert text.rstrip("\n") in server.out


def test_all_absent_objects_are_named_at_once_and_nothing_is_created(admin: Person) -> None:
    template = (
        "{spec: {volumes: [{name: hub, secret: {secretName: hub}}],"
        " imagePullSecrets: [{name: mirror}], runtimeClassName: gvisor}}"
    )
    wrong = {
        "image_pull_secrets": "[registry]",
        "priority_class": "high",
        "env": "{TOKEN: {config_map: site, key: token}}",
        "pod_template": template,
        "service_account": "nobody",
    }
    keys = [
        "cluster.kubernetes.image_pull_secrets[0]: must be a Secret of namespace default",
        "cluster.kubernetes.priority_class: must be a PriorityClass of the cluster",
        "cluster.kubernetes.env.TOKEN: must be a ConfigMap of namespace default",
        "cluster.kubernetes.pod_template.spec.volumes[hub].secret: must be a Secret",
        "cluster.kubernetes.pod_template.spec.imagePullSecrets[mirror]: must be a Secret",
        "cluster.kubernetes.pod_template.spec.runtimeClassName: must be a RuntimeClass",
        "cluster.kubernetes.service_account: must be a ServiceAccount of namespace default",
    ]
    found = findings(admin, **wrong)
    for words in ((), ("--dry-run",)):
        done = admin.submit(*words, **wrong)
        assert done.code == exit_codes.BACKEND
        messages = error_lines(done)
        for key in keys:
            assert any(line.startswith(key) for line in messages), (key, done.err)
            assert found[key.partition(": ")[0]]["verdict"] == "stops"
    assert admin.job() is None
    assert not admin.kube.objects("configmaps", selector="ndctl.dev/job=e2e")


def test_misspelt_keys_and_a_wrong_container_are_refused_with_the_nearest_name(
    admin: Person,
) -> None:
    """This API server drops unknown fields silently."""
    template = (
        "{spec: {priorityClasName: high, containers: [{name: main, env: []},"
        " {name: pytorch, resource: {}}]}}"
    )
    for words in ((), ("--dry-run=client",), ("--dry-run=server",)):
        done = admin.submit(*words, pod_template=template)
        assert done.code == exit_codes.BAD_SPEC, done.err
        assert "did you mean priorityClassName?" in done.err
        assert "did you mean resources?" in done.err
        assert "did you mean pytorch?" in done.err
    assert admin.job() is None


@pytest.fixture
def old_operator(kube: KubeTestbed) -> Iterator[None]:
    """The CRD of training operator 1.6, which has no nprocPerNode."""
    field = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/nprocPerNode"
    crd = json.loads(kube.kubectl("get", "crd", CRD, "-o", "json"))
    version = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    was = version["properties"]["nprocPerNode"]
    _patched(kube, [{"op": "remove", "path": field}])
    kube.wait_for("the schema without it", lambda: not _has_field(kube))
    yield
    _patched(kube, [{"op": "add", "path": field, "value": was}])
    kube.wait_for("the schema with it", lambda: _has_field(kube))


def _patched(kube: KubeTestbed, change: list[dict[str, Any]]) -> None:
    kube.kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps(change))


def _has_field(kube: KubeTestbed) -> bool:
    for definition in json.loads(kube.kubectl("get", "--raw", "/openapi/v2"))[
        "definitions"
    ].values():
        kinds = definition.get("x-kubernetes-group-version-kind", ())
        if any(one["kind"] == "PyTorchJob" for one in kinds):
            return "nprocPerNode" in definition["properties"]["spec"]["properties"]
    return False


@pytest.mark.slow
@pytest.mark.usefixtures("old_operator")
def test_an_operator_that_is_too_old_is_recognised_by_its_schema(admin: Person) -> None:
    done = admin.submit()
    assert done.code == exit_codes.BACKEND
    assert "Kubeflow's training operator v1 is older than 1.7: its PyTorchJob has no" in done.err
    assert "spec.nprocPerNode, so the cluster would drop it" in done.err
    assert "training-operator.git/manifests/overlays/standalone?ref=v1.9.3" in done.err
    assert findings(admin)["pytorchjob"]["verdict"] == "stops"
    assert admin.job() is None


def test_a_warning_of_a_real_server_is_shown(kube: KubeTestbed) -> None:
    api = Api(None, {"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    for _ in range(2):
        api.read("/apis/extensions/v1beta1/ingresses")
    assert api.warnings == (
        "extensions/v1beta1 Ingress is deprecated in v1.14+, unavailable in v1.22+; use"
        " networking.k8s.io/v1 Ingress",
    )


def test_one_grant_is_enough_to_list_jobs(kube: KubeTestbed, tmp_path: Path) -> None:
    """The API server refuses one kind at a time."""
    namespace = kube.namespace("looks")
    environ = {"KUBECONFIG": str(kube.as_user([], namespace))}
    with pytest.raises(Forbidden, match="its jobs cannot be shown") as refused:
        mirrors_at(tmp_path, None, namespace, environ, SystemClock())
    with pytest.raises(Forbidden) as of_one_job:
        seek_mirror(tmp_path, "e2e", None, namespace, environ, SystemClock())
    assert of_one_job.value.fix == refused.value.fix
    for command in advised(str(refused.value)):
        kube.kubectl(*command[1:])
    assert mirrors_at(tmp_path, None, namespace, environ, SystemClock()) == []
    with pytest.raises(JobError, match="no job 'e2e' in namespace looks"):
        seek_mirror(tmp_path, "e2e", None, namespace, environ, SystemClock())

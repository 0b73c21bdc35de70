"""Manifests on a real API server, applied with kubectl."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.backends.kubernetes.render import objects, text
from tests.backends.kubernetes.rendered import CASES
from tests.kubernetes.testbed import KubeTestbed
from tests.manifests.examples import EXAMPLES, FOLDER, ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

MANIFESTS = ROOT / "manifests"
FILES = {f"example-{name}": FOLDER / f"{name}.yaml" for name in EXAMPLES}
NAMESPACES = ("plain", "training", "ndctl")


@pytest.fixture
def still(kube: KubeTestbed) -> KubeTestbed:
    """A cluster whose quotas allow no pod, because only the objects are checked."""
    for name in NAMESPACES:
        kube.namespace(name)
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "still"}}
        kube.apply({**quota, "spec": {"hard": {"pods": "0"}}}, namespace=name)
    return kube


def manifest(name: str, folder: Path) -> Path:
    """An example, or a case of the rendering tests written to the folder."""
    if name in FILES:
        return FILES[name]
    path = folder / f"{name}.yaml"
    path.write_text(text(objects(CASES[name])) + "\n")
    return path


def namespace_of(path: Path) -> str:
    first = next(iter(yaml.load_all(path.read_text(), yaml.CSafeLoader)))
    return str(first["metadata"].get("namespace", "plain"))


def dropped(sent: Any, kept: Any, path: str = "") -> Iterator[str]:
    """The paths of fields that were sent but not stored."""
    if isinstance(sent, Mapping) and isinstance(kept, Mapping):
        for key, value in sent.items():
            yield from dropped(value, kept.get(key), f"{path}.{key}")
    elif isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        for at, (one, other) in enumerate(zip(sent, kept, strict=True)):
            yield from dropped(one, other, f"{path}[{at}]")
    elif sent != kept:
        yield f"{path}: sent {sent!r}, kept {kept!r}"


def strict(kube: KubeTestbed) -> tuple[str, ...]:
    """An API server from 1.27 on refuses a field that it does not know or has twice; before, what
    is dropped is found afterwards alone."""
    return ("--validate=strict",) if kube.minor_version >= 27 else ()


def test_applied_objects_keep_all_fields_and_a_second_apply_changes_nothing(
    still: KubeTestbed, tmp_path: Path
) -> None:
    for path in (manifest(name, tmp_path) for name in (*CASES, *FILES)):
        place = ("-n", namespace_of(path), "-f", str(path))
        if path.parent == FOLDER:
            assert "created (dry run)" in still.kubectl("apply", "--dry-run=client", *place)
            tried = still.kubectl("apply", "--dry-run=server", *strict(still), *place)
            assert "created (server dry run)" in tried
        own = ("apply", "--server-side", "--field-manager=ndctl", *strict(still))
        still.kubectl(*own, *place)
        sent = list(yaml.load_all(path.read_text(), yaml.CSafeLoader))
        kept = _items(still.kubectl("get", "-o", "json", *place))
        assert list(dropped(sent, kept)) == [], path.name
        still.kubectl(*own, *place)
        again = _items(still.kubectl("get", "-o", "json", *place))
        assert [_managed(item) for item in again] == [_managed(item) for item in kept]
        still.kubectl("delete", "--wait=false", *place)


def _items(text: str) -> list[dict[str, Any]]:
    found = json.loads(text)
    items: list[dict[str, Any]] = found["items"] if found["kind"] == "List" else [found]
    return items


def _managed(item: Mapping[str, Any]) -> Any:
    """The object without the fields that an operator writes."""
    return item["kind"], item["metadata"].get("generation")


def pod_of(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """A pod that an operator creates from the object."""
    spec = item.get("spec", {})
    if item["kind"] == "PyTorchJob":
        template = spec["pytorchReplicaSpecs"]["Master"]["template"]
    elif item["kind"] in ("JobSet", "TrainingRuntime"):
        body = spec if item["kind"] == "JobSet" else spec["template"]["spec"]
        template = body["replicatedJobs"][0]["template"]["spec"]["template"]
    else:
        return None
    spec = {"restartPolicy": "Never", **template["spec"]}
    metadata = {**template["metadata"], "name": "pod"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


PERSON = ("--as=ada", "--as-group=ndctl-users", "--as-group=system:authenticated")


@pytest.mark.parametrize("name", [*CASES, *FILES])
def test_the_api_server_accepts_the_pods_of_a_job(
    kube: KubeTestbed, name: str, tmp_path: Path
) -> None:
    """The API server does not check them when it accepts the job."""
    items = yaml.load_all(manifest(name, tmp_path).read_text(), yaml.CSafeLoader)
    (pod,) = (pod for item in items if (pod := pod_of(item)) is not None)
    sites = list(what_a_site_has_for(pod["spec"]))
    kube.apply(*sites)
    file = kube.folder / "pod.yaml"
    file.write_text(yaml.safe_dump(pod))
    try:
        create = ("create", "--dry-run=server", *strict(kube), "-f", str(file), "-o", "json")
        tried = json.loads(kube.kubectl(*create))
        assert (tried["status"]["qosClass"] == "Guaranteed") is ("guaranteed" in name)
    finally:
        for one in sites:
            kube.kubectl("delete", one["kind"], one["metadata"]["name"])


def what_a_site_has_for(pod: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects that the pod names but no submission creates."""
    account = {"name": pod["serviceAccountName"]}
    yield {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}
    if name := pod.get("priorityClassName"):
        high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
        yield {**high, "metadata": {"name": name}}
    if name := pod.get("runtimeClassName"):
        runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": name}
        yield {**runtime, "metadata": {"name": name}}


def test_kubectl_apply_of_the_documents_works(still: KubeTestbed, tmp_path: Path) -> None:
    for kind in ("pytorchjob", "jobset", "trainjob"):
        place = ("-n", "plain", "-f", str(manifest(kind, tmp_path)))
        assert "created" in still.kubectl("apply", *place)
        assert "unchanged" in still.kubectl("apply", *place)
        still.kubectl("delete", "--wait=false", *place)


def test_kustomize_puts_the_objects_of_each_folder_into_the_namespace(kube: KubeTestbed) -> None:
    levels = {}
    for folder in ("base", "overlays/kueue", "overlays/rdma"):
        made = list(yaml.safe_load_all(kube.kubectl("kustomize", str(MANIFESTS / folder))))
        assert {one["metadata"].get("namespace", "ndctl") for one in made} == {"ndctl"}
        namespaces = [one["metadata"]["labels"] for one in made if one["kind"] == "Namespace"]
        levels[folder] = [one["pod-security.kubernetes.io/enforce"] for one in namespaces]
    assert levels == {"base": ["baseline"], "overlays/kueue": [], "overlays/rdma": ["privileged"]}


def test_two_namespaces_each_have_the_base_with_their_own_rights(kube: KubeTestbed) -> None:
    for folder in ("base", "overlays/another-namespace"):
        kube.kubectl("apply", "-k", str(MANIFESTS / folder))
    try:
        for name in ("ndctl", "team-a"):
            argv = ["kubectl", "auth", "can-i", "list", "nodes", "--as=anybody"]
            group = f"--as-group=system:serviceaccounts:{name}"
            assert kube([*argv, group]).out.strip() == "yes"
            assert kube([*argv, f"{group}-2"]).out.strip() == "no"
            person = ["kubectl", "auth", "can-i", "create", "configmaps", "-n", name]
            assert kube([*person, *PERSON]).out.strip() == "yes"
            labels = kube.get("namespaces", name)["metadata"]["labels"]
            assert labels["pod-security.kubernetes.io/enforce"] == "baseline"
    finally:
        kube.kubectl("delete", "clusterrolebinding", "ndctl-nodes-of-namespace-team-a")


def test_a_copy_of_the_overlay_is_in_the_namespace_that_it_names(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    """As the first lines of the overlay describe."""
    manifests = tmp_path / "manifests"
    shutil.copytree(MANIFESTS / "base", manifests / "base")
    shutil.copytree(MANIFESTS / "overlays", manifests / "overlays")
    text = (MANIFESTS / "overlays/another-namespace/kustomization.yaml").read_text()
    lines = [one[4:].replace("NAME", "team-b") for one in text.splitlines() if one[:4] == "#   "]
    assert [one.split()[0] for one in lines] == ["cp", "sed"]
    for line in lines:
        subprocess.run(line, cwd=tmp_path, shell=True, check=True)
    printed = kube.kubectl("kustomize", str(manifests / "overlays" / "team-b"))
    made = list(yaml.safe_load_all(printed))
    assert {one["metadata"].get("namespace", "team-b") for one in made} == {"team-b"}
    assert [one["metadata"]["name"] for one in made if one["kind"] == "Namespace"] == ["team-b"]
    assert "team-a" not in printed
    assert not re.search(r"(serviceaccounts:|namespace[-:] *)ndctl$", printed, re.MULTILINE)

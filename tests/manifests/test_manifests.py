"""The files in manifests/ are valid, complete and grant only the intended rights."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from orchestrator.backends.kubernetes.checks.permissions import needed
from orchestrator.backends.kubernetes.resources import JOB_KINDS
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec
from tests.backends.kubernetes import structural
from tests.backends.kubernetes.rendered import CRDS
from tests.manifests.examples import EXAMPLES, FOLDER, ROOT, rendered

MANIFESTS = ROOT / "manifests"


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / path).read_text()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_equals_the_output_of_the_command_in_its_first_line(name: str) -> None:
    assert rendered(name) == (FOLDER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_only_fields_that_the_schemas_know(name: str) -> None:
    custom = [item for item in documents(f"examples/{name}.yaml") if item["kind"] in CRDS]
    assert custom
    for item in custom:
        for file in CRDS[item["kind"]]:
            assert structural.problems(item, file) == []


FOLDERS = (
    "base",
    "controller",
    "admission",
    *(f"overlays/{it}" for it in ("another-namespace", "kueue", "rdma")),
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_of_a_kustomization_exists_and_is_used(folder: str) -> None:
    (made,) = documents(f"{folder}/kustomization.yaml")
    listed = [*made.get("resources", ()), *made.get("patchesStrategicMerge", ())]
    listed += [one["path"] for one in made.get("patchesJson6902", ())]
    there = {path.name for path in (MANIFESTS / folder).iterdir()} - {"kustomization.yaml"}
    assert sorted(listed) == sorted(there)


def test_pods_of_all_jobs_may_only_read_nodes() -> None:
    role, binding = documents("base/job.yaml")
    assert (role["kind"], binding["kind"]) == ("ClusterRole", "ClusterRoleBinding")
    (rule,) = role["rules"]
    assert (rule["resources"], rule["verbs"]) == (["nodes"], ["get", "list", "watch"])


@pytest.mark.parametrize("file", ["base/user.yaml", "controller/account.yaml"])
def test_no_role_deletes_all_secrets_at_once(file: str) -> None:
    for one in documents(file):
        for rule in one.get("rules", ()):
            if "secrets" in rule["resources"]:
                assert "deletecollection" not in rule["verbs"]


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_the_role_of_people_allows_to_submit_watch_and_cancel(kind: Kind) -> None:
    (role, *_) = documents("base/user.yaml")
    may = {
        (verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    lacking = {
        (one.verb, one.resource.group, one.resource.plural + (f"/{one.sub}" if one.sub else ""))
        for one in needed(KubernetesSpec(kind=kind))
    } - may
    assert not lacking


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_queue_has_a_quota_of_all_that_pods_ask_for(name: str) -> None:
    (queue,) = (
        one for one in documents("overlays/kueue/queue.yaml") if one["kind"] == "ClusterQueue"
    )
    covered = {
        one for group in queue["spec"]["resourceGroups"] for one in group["coveredResources"]
    }
    asked = {
        resource
        for item in documents(f"examples/{name}.yaml")
        for container in _containers(item)
        for part in ("requests", "limits")
        for resource in container.get("resources", {}).get(part, {})
    }
    assert asked
    assert not asked - covered


def _containers(item: Any) -> Iterator[dict[str, Any]]:
    """The containers of all pod templates in the object."""
    if isinstance(item, Mapping):
        yield from item.get("containers", ())
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ()
    for part in parts:
        yield from _containers(part)

"""Operators whose CRD schemas are too old for the objects that ndctl sends."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.kind_schemas import KindSchemas, has, lacking
from orchestrator.backends.kubernetes.checks.kinds_available import fields_unknown, kind_there
from orchestrator.backends.kubernetes.resources import JOB_KINDS, JOBSETS, PYTORCHJOBS
from orchestrator.contract.spec.kubernetes_spec import Kind
from tests.backends.kubernetes.fake_api import FakeApi
from tests.backends.kubernetes.rendered import CASES, FULL, PLAIN, a_handover
from tests.doctor.test_kubernetes import served

KINDS = Path(__file__).parents[3] / "captured" / "kubernetes" / "kinds"
CRDS = Path(__file__).parents[4] / "manifests" / "crds"
NEWEST = {
    "pytorchjob": ("pytorchjobs-v1.9.4",),
    "jobset": ("jobsets-v0.12.0",),
    "trainjob": ("trainer-trainjobs-v2.0.0", "trainer-trainingruntimes-v2.0.0"),
}


def group_path(kind: Kind) -> str:
    resource = JOB_KINDS[kind].resource
    return f"/openapi/v3/apis/{resource.group}/{resource.version}"


def old(kind: Kind, name: str) -> FakeApi:
    """A cluster with the operator whose schema is a file in `kinds/`."""
    resource = JOB_KINDS[kind].resource
    document = json.loads((KINDS / f"{name}.json").read_text())
    paths = served(resource.group, resource.version, resource.plural)
    return FakeApi(paths={**paths, group_path(kind): document})


def newest(kind: Kind) -> FakeApi:
    """A cluster that publishes the CRDs in `manifests/crds`."""
    resource = JOB_KINDS[kind].resource
    schemas = {}
    for name in NEWEST[kind]:
        definition = yaml.load((CRDS / f"{name}.yaml").read_text(), yaml.CSafeLoader)["spec"]
        (version,) = (one for one in definition["versions"] if one["name"] == resource.version)
        gvk = {"group": resource.group, "version": resource.version}
        gvk["kind"] = definition["names"]["kind"]
        schema = version["schema"]["openAPIV3Schema"]
        schemas[name] = {**schema, "x-kubernetes-group-version-kind": [gvk]}
    paths = served(resource.group, resource.version, resource.plural)
    return FakeApi(paths={**paths, group_path(kind): {"components": {"schemas": schemas}}})


@pytest.mark.parametrize(
    ("kind", "name", "field"),
    [
        ("pytorchjob", "pytorchjobs-v1.5.0", "spec.nprocPerNode"),
        ("pytorchjob", "pytorchjobs-v1.6.0", "spec.nprocPerNode"),
        ("jobset", "jobsets-v0.4.0", "spec.network.publishNotReadyAddresses"),
        ("jobset", "jobsets-v0.5.2", "spec.network.publishNotReadyAddresses"),
    ],
)
def test_an_operator_that_is_too_old_is_recognised_by_missing_fields(
    kind: Kind, name: str, field: str
) -> None:
    found = kind_there(KindSchemas(old(kind, name)), kind)
    assert found.verdict == "stops"
    assert field in found.found
    assert f"older than {JOB_KINDS[kind].since}" in found.found
    assert JOB_KINDS[kind].install in found.fix
    assert kind_there(KindSchemas(old(kind, name)), kind, wanted=False).verdict == "note"


@pytest.mark.parametrize(
    ("kind", "name"), [("pytorchjob", "pytorchjobs-v1.7.0"), ("jobset", "jobsets-v0.6.0")]
)
def test_the_first_sufficient_version_passes(kind: Kind, name: str) -> None:
    schemas = KindSchemas(old(kind, name))
    assert kind_there(schemas, kind).verdict == "ok"
    assert list(fields_unknown(schemas, a_handover(PLAIN, kind), "ns")) == []


def test_every_field_that_is_dropped_is_named_with_the_version_to_install() -> None:
    """An old JobSet lacks several fields. Without one of them, exit code 0 of the master would not
    end the job."""
    schemas = KindSchemas(old("jobset", "jobsets-v0.5.2"))
    found = list(fields_unknown(schemas, a_handover(PLAIN, "jobset"), "ns"))
    assert [one.what for one in found] == [
        "jobset spec.network.publishNotReadyAddresses",
        "jobset spec.replicatedJobs[0].template.spec.successPolicy",
    ]
    assert all("older than 0.6" in one.found for one in found)
    assert all("jobset/releases/download/v0.12.0" in one.fix for one in found)


@pytest.mark.parametrize("name", CASES)
def test_the_newest_operators_know_all_fields_that_ndctl_sends(name: str) -> None:
    handover = CASES[name]
    assert handover.launch.kubernetes is not None
    kind = handover.launch.kubernetes.kind
    schemas = KindSchemas(newest(kind))
    assert kind_there(schemas, kind).verdict == "ok"
    assert list(fields_unknown(schemas, handover, "ns")) == []


def test_a_field_of_the_users_own_that_the_kind_lacks_is_named_by_its_key() -> None:
    """Kubernetes knows the field, but the operator is older than it."""
    pod = {"evictionResponders": [], "schedulerName": "mine"}
    spec = replace(PLAIN, pod_template={"spec": pod})
    schemas = KindSchemas(newest("pytorchjob"))
    (told,) = fields_unknown(schemas, a_handover(spec), "ns")
    assert told.what == "cluster.kubernetes.pod_template.spec.evictionResponders"
    assert told.found == (
        "must be a field that the PyTorchJob of this cluster has; it has no evictionResponders, so"
        " the cluster would drop it"
    )
    assert "newer version of Kubeflow's training operator" in told.fix


def test_an_old_server_has_one_schema_document_for_all_kinds() -> None:
    v3 = newest("pytorchjob").paths[group_path("pytorchjob")]
    whole = {"definitions": v3["components"]["schemas"]}
    schemas = KindSchemas(FakeApi(paths={"/openapi/v2": whole}))
    schema = schemas.of(PYTORCHJOBS)
    assert schema is not None
    assert has(schema, ("spec", "nprocPerNode"))
    assert not has(schema, ("spec", "nprocPerPod"))
    assert schemas.of(JOBSETS) is None
    assert list(schemas.documents) == [
        "/openapi/v3/apis/kubeflow.org/v1",
        "/openapi/v2",
        "/openapi/v3/apis/jobset.x-k8s.io/v1alpha2",
    ]


def test_without_the_right_to_read_schemas_the_job_has_no_problem() -> None:
    paths: dict[str, Any] = served("kubeflow.org", "v1", "pytorchjobs")
    paths[group_path("pytorchjob")] = Forbidden("no")
    schemas = KindSchemas(FakeApi(paths=paths))
    assert kind_there(schemas, "pytorchjob").verdict == "ok"
    assert list(fields_unknown(schemas, a_handover(FULL), "ns")) == []


def test_an_open_part_of_a_schema_accepts_every_field() -> None:
    schema = {
        "properties": {
            "spec": {
                "properties": {
                    "open": {"x-kubernetes-preserve-unknown-fields": True, "properties": {}},
                    "map": {"additionalProperties": {"properties": {"a": {}}}},
                    "any": {},
                }
            }
        }
    }
    item = {
        "apiVersion": "x",
        "kind": "X",
        "metadata": {"strange": 1},
        "spec": {
            "open": {"b": 1},
            "map": {"k": {"a": 1, "b": 2}},
            "any": {"c": [1]},
            "d": {"e": 1},
        },
    }
    assert [str(one) for one in lacking(item, schema)] == ["spec.map.k.b", "spec.d"]

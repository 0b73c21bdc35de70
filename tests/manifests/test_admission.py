"""manifests/admission: the expressions of the policies are evaluated on requests as the API server
sees them, and tested on a server that supports such policies."""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import celpy
import pytest
import yaml
from celpy import celtypes
from celpy.adapter import json_to_cel

from orchestrator.backends.kubernetes.controller.actions import Create, Patch
from orchestrator.backends.kubernetes.controller.decide import decide
from orchestrator.backends.kubernetes.controller.pod_requests import GangRestart
from orchestrator.backends.kubernetes.render import names, objects
from orchestrator.backends.kubernetes.resources import JOB_KINDS, Object
from orchestrator.contract.spec.kubernetes_spec import Kind
from tests.backends.kubernetes.controller import world
from tests.backends.kubernetes.controller.world import SCOPE, merge, node, pod, seen
from tests.backends.kubernetes.rendered import PLAIN, a_handover
from tests.kubernetes.testbed import KubeTestbed
from tests.manifests.examples import ROOT

FOLDER = ROOT / "manifests" / "admission"
PODS = "system:serviceaccount:ndctl:job-pods"
CONTROLLER = "system:serviceaccount:ndctl:ndctl-controller"
Item = dict[str, Any]


def policy(name: str) -> Item:
    found = [
        one
        for path in sorted(FOLDER.glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
        if one["kind"] == "ValidatingAdmissionPolicy" and one["metadata"]["name"] == name
    ]
    assert len(found) == 1
    spec: Item = found[0]["spec"]
    return spec


FUNCTIONS: Any = {
    "split": lambda text, by: celtypes.ListType(
        [celtypes.StringType(one) for one in str(text).split(str(by))]
    ),
    "substring": lambda text, first, last: celtypes.StringType(str(text)[int(first) : int(last)]),
}
"""Of Kubernetes' own library of strings."""


@functools.cache
def environment() -> celpy.Environment:
    """Reading the grammar takes a second, and each worker imports this file."""
    return celpy.Environment()


@functools.cache
def program(expression: str) -> celpy.Runner:
    return environment().program(environment().compile(expression), functions=FUNCTIONS)


def evaluated(expression: str, context: Mapping[str, Any]) -> Any:
    return program(expression).evaluate({key: json_to_cel(value) for key, value in context.items()})


def refusal(
    name: str,
    user: str,
    what: str,
    operation: str,
    item: Object | None = None,
    before: Object | None = None,
) -> str:
    """The reason why the policy refuses a request, or "". `what` is RESOURCE/NAME."""
    spec, (resource, _, called) = policy(name), what.partition("/")
    group = next(
        (one.resource.group for one in JOB_KINDS.values() if one.resource.plural == resource), ""
    )
    context: Item = {
        "request": {
            "userInfo": {"username": user},
            "resource": {"group": group, "resource": resource},
            "operation": operation,
            "name": called,
        },
        "object": item,
        "oldObject": before,
    }
    for one in spec["matchConditions"]:
        if not evaluated(one["expression"], context):
            return ""
    variables: Item = {}
    for one in spec.get("variables", ()):
        said = evaluated(one["expression"], {**context, "variables": variables})
        variables[one["name"]] = str(said)
    for one in spec["validations"]:
        if not evaluated(one["expression"], {**context, "variables": variables}):
            words = one.get("message") or evaluated(
                one["messageExpression"], {**context, "variables": variables}
            )
            return str(words)
    return ""


def made(kind: Kind) -> dict[str, Item]:
    return {one["kind"]: one for one in objects(a_handover(PLAIN, kind))}


def with_notes(item: Item, **more: Any) -> Item:
    return {**item, "metadata": {**item["metadata"], "annotations": {"x": "y"}}, **more}


def test_pods_annotate_their_config_map_and_change_nothing_in_it() -> None:
    mine = made("pytorchjob")["ConfigMap"]
    ask = ("ndctl-pods", PODS, "configmaps/job-launch", "UPDATE")
    assert refusal(*ask, with_notes(mine), mine) == ""
    packed = {**{key: mine[key] for key in ("metadata", "kind")}, "binaryData": {"a": "YQ=="}}
    assert refusal(*ask, with_notes(packed), packed) == ""
    said = refusal(*ask, with_notes(mine, data={"spec.yaml": "name: x"}), mine)
    assert said.startswith("pods of job job may annotate ConfigMap job-launch")
    assert refusal(*ask, packed, mine)
    other = ("ndctl-pods", PODS, "configmaps/other-launch", "UPDATE")
    assert refusal(*other, with_notes(mine), mine)


def test_pods_delete_only_pods_of_their_job() -> None:
    ask = ("ndctl-pods", PODS, "pods/any", "DELETE")
    mine = {"metadata": {"labels": {names.JOB_LABEL: "job"}}}
    assert refusal(*ask, None, mine) == ""
    for labels in ({names.JOB_LABEL: "other"}, {"app": "shop"}):
        assert refusal(*ask, None, {"metadata": {"labels": labels}})
    assert refusal(*ask, None, {"metadata": {}})


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_pods_write_nothing_else_even_if_a_role_allows_it(kind: Kind) -> None:
    for item in made(kind).values():
        plural = f"{item['kind'].lower()}s/{item['metadata']['name']}"
        if item["kind"] != "ConfigMap":
            assert refusal("ndctl-pods", PODS, plural, "UPDATE", item, item)
        assert refusal("ndctl-pods", PODS, plural, "CREATE", item)
        assert refusal("ndctl-pods", PODS, plural, "DELETE", None, item)
        assert refusal("ndctl-pods", "ada", plural, "CREATE", item) == "", (
            "it is no account of pods"
        )


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_every_action_of_the_controller_is_allowed(kind: Kind) -> None:
    """All its requests for a job that uses every feature."""
    job = copy.deepcopy(objects(a_handover(PLAIN, kind))[-1])
    job["metadata"] |= {"namespace": "training", "uid": "uid-job", "resourceVersion": "1"}
    asks = {names.GANG_ANNOTATION: GangRestart(exclude=("node1",)).text()}
    where, pods = f"{JOB_KINDS[kind].resource.plural}/job", [pod("job-a", on="node2")]
    told = []
    for _ in range(8):
        what = seen(job, kind=kind, asks=asks, pods=pods, nodes=(node(),))
        for action in (one for chain in decide(what, SCOPE, {}, 0.0).chains for one in chain):
            told.append(action.does.split()[0])
            if isinstance(action, Create):
                # As the API server completes it.
                whole = merge(action.item, {"spec": {"serviceAccountName": "default"}})
                assert refusal("ndctl-controller", CONTROLLER, "pods/x", "CREATE", whole) == ""
                pods.append(whole)
                continue
            assert isinstance(action, Patch)
            after = merge(job, action.change)
            assert refusal("ndctl-controller", CONTROLLER, where, "UPDATE", after, job) == ""
            job = after
            if action.does.startswith("suspend"):
                pods = pods[1:]
    placed = [] if kind == "pytorchjob" else ["create"]
    assert told == ["manage", "keep", *placed, "suspend", "resume"]


CHANGES: dict[str, Any] = {
    "account": {"serviceAccountName": "default"},
    "no account": {"serviceAccountName": None},
    "security": {"securityContext": None},
    "volumes": {"volumes": [{"name": "s", "secret": {"secretName": "other-teams"}}]},
    "containers": {"containers": [{"name": "pytorch", "image": "evil"}]},
    "host": {"hostNetwork": True},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_controller_changes_only_the_affinity_of_a_template(change: Item) -> None:
    job = made("pytorchjob")["PyTorchJob"]
    ask = ("ndctl-controller", CONTROLLER, "pytorchjobs/job", "UPDATE")
    replicas = {"Worker": {"template": {"spec": change}}}
    after = merge(job, {"spec": {"pytorchReplicaSpecs": replicas}})
    assert refusal(*ask, after, job) == "the controller changes the affinity of a template alone"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("pytorchjob", {"spec": {"nprocPerNode": "1"}}),
        ("pytorchjob", {"spec": {"runPolicy": {"backoffLimit": 0}}}),
        ("pytorchjob", {"spec": {"runPolicy": {"cleanPodPolicy": None}}}),
        ("pytorchjob", {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 99}}}}),
        ("pytorchjob", {"spec": {"pytorchReplicaSpecs": {"Worker": None}}}),
        ("jobset", {"spec": {"replicatedJobs": []}}),
        ("jobset", {"spec": {"network": None}}),
        ("trainjob", {"spec": {"trainer": {"image": "evil"}}}),
        ("trainjob", {"metadata": {"labels": {names.JOB_LABEL: "other"}}}),
    ],
)
def test_the_controller_changes_nothing_else_of_a_job(kind: Kind, change: Item) -> None:
    job = objects(a_handover(PLAIN, kind))[-1]
    where = f"{JOB_KINDS[kind].resource.plural}/job"
    assert refusal("ndctl-controller", CONTROLLER, where, "UPDATE", merge(job, change), job)
    foreign = merge(job, {"metadata": {"labels": {names.MANAGED_LABEL: "helm"}}})
    assert refusal("ndctl-controller", CONTROLLER, where, "UPDATE", foreign, foreign)


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"volumes": [{"name": "s"}]}},
        {"spec": {"serviceAccountName": "admin"}},
        {"spec": {"automountServiceAccountToken": True}},
        {"spec": {"automountServiceAccountToken": None}},
        {"spec": {"initContainers": [{"name": "a"}]}},
        {"spec": {"containers": [{"name": "a", "env": []}]}},
        {"metadata": {"labels": {names.KEEPS_OFF_LABEL: None}}},
    ],
)
def test_the_controller_creates_only_placeholders(change: Item) -> None:
    asks = {names.AVOID_ANNOTATION: "node1"}
    notes = {names.EXCLUDED_ANNOTATION: "node1"}
    what = seen(
        world.job("jobset", notes=notes), kind="jobset", asks=asks, pods=[pod("a", on="node2")]
    )
    ((action,),) = decide(what, SCOPE, {}, 0.0).chains
    assert isinstance(action, Create)
    ask = ("ndctl-controller", CONTROLLER, "pods/x", "CREATE")
    assert refusal(*ask, action.item) == ""
    assert refusal(*ask, merge(action.item, change))


def test_every_file_is_used_and_every_policy_is_bound() -> None:
    used = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert sorted(used) == sorted({path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"})
    every = [one for name in used for one in yaml.safe_load_all((FOLDER / name).read_text())]
    bound = {one["spec"]["policyName"] for one in every if one["kind"].endswith("Binding")}
    assert bound == {one["metadata"]["name"] for one in every}
    assert all(
        one["spec"]["validationActions"] == ["Deny"] for one in every if "Binding" in one["kind"]
    )


SINCE = 30
"""The first minor version of the API server that supports such policies."""


@pytest.mark.kubernetes
def test_a_server_that_has_such_policies_refuses_what_a_role_allows_by_mistake(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    if kube.minor_version < SINCE:
        pytest.skip(f"{kube.version} has no ValidatingAdmissionPolicy")
    kube.kubectl("apply", "-k", str(ROOT / "manifests" / "base"))
    kube.kubectl("apply", "-k", str(FOLDER))
    try:
        kube.kubectl("-n", "ndctl", "create", "rolebinding", "mistake", "--clusterrole=admin",
                     "--serviceaccount=ndctl:job-pods")  # fmt: skip
        command = ["kubectl", "-n", "ndctl", f"--as={PODS}", "create", "configmap"]

        def refused() -> bool:
            done = kube([*command, f"any{len(done_before)}"])
            done_before.append(done.code)
            return "and write nothing else" in done.err

        done_before: list[int] = []
        kube.wait_for("the policy", refused)
        kube.kubectl("-n", "ndctl", "create", "configmap", "job-launch")
        note = ["kubectl", "-n", "ndctl", f"--as={PODS}", "annotate", "configmap", "job-launch"]
        assert kube([*note, "ndctl.dev/avoid=node1"]).code == 0
    finally:
        kube.kubectl("delete", "-k", str(FOLDER))

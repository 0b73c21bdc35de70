"""Rights of the pods of a job, by the rules of its Role."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.render import objects
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec
from tests.backends.kubernetes.rendered import CASES, FULL, PLAIN, a_handover

KINDS: tuple[Kind, ...] = ("pytorchjob", "jobset", "trainjob")
JOBS = {
    "pytorchjob": "kubeflow.org/pytorchjobs",
    "jobset": "jobset.x-k8s.io/jobsets",
    "trainjob": "trainer.kubeflow.org/trainjobs",
}


def role_of(kind: Kind, hosts: int = 3) -> dict[str, Any]:
    (role,) = [one for one in objects(a_handover(PLAIN, kind, hosts)) if one["kind"] == "Role"]
    return role


def may(role: dict[str, Any], verb: str, resource: str, name: str = "") -> bool:
    """Whether RBAC allows it. `resource` has its group; without a name, for all objects."""
    group, _, plural = resource.rpartition("/") if not resource.startswith("/") else ("", "", "")
    group, plural = ("", resource[1:]) if resource.startswith("/") else (group, plural)
    return any(
        verb in rule["verbs"]
        and group in rule["apiGroups"]
        and plural in rule["resources"]
        and (not rule.get("resourceNames") or name in rule["resourceNames"])
        for rule in role["rules"]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pods_write_two_config_maps_and_no_pod_template(kind: Kind) -> None:
    role = role_of(kind)
    assert may(role, "patch", "/configmaps", "job-launch")
    assert may(role, "patch", "/configmaps", "job-state")
    for other in ("", "another", "job", "other-launch"):
        assert not may(role, "patch", "/configmaps", other)
    writes = {
        (verb, resource)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if verb not in ("get", "list", "watch")
    }
    deletes = {("delete", "pods")} if kind == "pytorchjob" else set()
    assert writes == {("patch", "configmaps"), ("create", "events")} | deletes
    assert may(role, "get", JOBS[kind], "job")
    assert not may(role, "get", JOBS[kind], "another")
    assert may(role, "list", "/pods")
    for verb in ("get", "list", "create", "patch", "delete"):
        assert not may(role, verb, "/secrets", "job-token")
        assert not may(role, verb, "/pods/exec", "job-master-0")
        assert not may(role, verb, "/pods/status", "job-master-0")
        assert not may(role, verb, "/serviceaccounts/token", "job-pods")
    for rule in role["rules"]:
        made = {"create"} if rule["resources"] == ["events"] else set()
        forbidden = {"*", "create", "update", "deletecollection", "escalate"} - made
        assert not {*rule["verbs"]} & forbidden
        assert "*" not in (*rule["resources"], *rule["apiGroups"])
    for other in {*JOBS.values()} - {JOBS[kind]}:
        assert not may(role, "get", other, "job")


@pytest.mark.parametrize("kind", KINDS)
def test_a_leader_may_report_on_its_job_and_watch_for_its_deletion(kind: Kind) -> None:
    role = role_of(kind)
    assert may(role, "watch", JOBS[kind], "job")
    assert may(role, "create", "/events")
    assert may(role, "patch", "/configmaps", "job-state")
    assert not may(role, "patch", "/configmaps", "other-state")
    made = objects(a_handover(PLAIN, kind, 3))
    (state,) = [one for one in made if one["metadata"]["name"] == "job-state"]
    assert "data" not in state, "applying the objects again must not erase the data"
    assert made[0]["metadata"]["name"] == "job-launch"


def test_pods_of_a_pytorchjob_are_deleted_by_their_names() -> None:
    role = role_of("pytorchjob", hosts=3)
    for pod in ("job-master-0", "job-worker-0", "job-worker-1"):
        assert may(role, "delete", "/pods", pod)
    for pod in ("", "job-worker-2", "other-master-0", "job-2-master-0"):
        assert not may(role, "delete", "/pods", pod)
    alone = role_of("pytorchjob", hosts=1)
    assert may(alone, "delete", "/pods", "job-master-0")
    assert not may(alone, "delete", "/pods", "job-worker-0")


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_pods_whose_names_are_not_known_beforehand_are_not_deleted(kind: Kind) -> None:
    for pod in ("", "job-node-0-0-abcde", "other-node-0-0-abcde"):
        assert not may(role_of(kind), "delete", "/pods", pod)


@pytest.mark.parametrize("kind", KINDS)
def test_the_binding_names_the_account_of_the_pods(kind: Kind) -> None:
    made = objects(a_handover(PLAIN, kind), "team-a")
    (account,) = [one for one in made if one["kind"] == "ServiceAccount"]
    (binding,) = [one for one in made if one["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] == "job-pods"
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "team-a"}
    ]
    assert made[-1]["kind"].lower() == kind, "the job must be created last"


def test_an_account_of_the_site_is_not_changed() -> None:
    made = objects(CASES["pytorchjob-full"])
    assert FULL.service_account == "trainer"
    assert not {one["kind"] for one in made} & {"ServiceAccount", "Role", "RoleBinding"}


def policy_of(spec: KubernetesSpec) -> dict[str, Any] | None:
    made = [one for one in objects(a_handover(spec)) if one["kind"] == "NetworkPolicy"]
    return made[0] if made else None


@pytest.mark.parametrize("kind", KINDS)
def test_only_pods_of_the_same_job_reach_a_pod(kind: Kind) -> None:
    made = objects(a_handover(PLAIN, kind))
    (policy,) = [one for one in made if one["kind"] == "NetworkPolicy"]
    spec = policy["spec"]
    assert policy["metadata"]["name"] == "job-pods"
    assert spec["policyTypes"] == ["Ingress"], (
        "DNS, the API server and object stores must stay reachable"
    )
    assert spec["ingress"] == [{"from": [{"podSelector": spec["podSelector"]}]}]
    assert spec["podSelector"] == {"matchLabels": {"ndctl.dev/job": "job"}}
    found = list(templates(made))
    assert found
    for pod in found:
        assert pod["metadata"]["labels"]["ndctl.dev/job"] == "job"


def test_the_network_policy_is_optional_and_omitted_if_it_has_no_effect() -> None:
    assert policy_of(PLAIN) is not None
    assert policy_of(replace(PLAIN, network_policy=False)) is None
    assert policy_of(replace(PLAIN, host_network=True)) is None
    assert policy_of(replace(PLAIN, service_account="trainer")) is not None


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """All pod templates in an object."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from templates(one)

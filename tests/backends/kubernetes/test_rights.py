"""What the pods of a job may do, by the rules of its Role."""

from typing import Any

import pytest

from orchestrator.backends.kubernetes.render import objects
from orchestrator.contract.kubernetes import Kind
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
    """As RBAC decides: `resource` with its group; without a name, of any of them."""
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
def test_pods_change_this_job_alone(kind: Kind) -> None:
    role = role_of(kind)
    for resource, own in (
        (JOBS[kind], "job"),
        ("/configmaps", "job-launch"),
        ("/serviceaccounts", "job-pods"),
        ("rbac.authorization.k8s.io/roles", "job-pods"),
        ("rbac.authorization.k8s.io/rolebindings", "job-pods"),
    ):
        assert may(role, "patch", resource, own)
        assert may(role, "get", resource, own)
        for other in ("", "another", "job-2", "other-launch", "default"):
            assert not may(role, "patch", resource, other), (resource, other)
    assert may(role, "list", "/pods")
    for verb in ("get", "list", "create", "patch", "delete"):
        assert not may(role, verb, "/secrets", "job-token")
        assert not may(role, verb, "/pods/exec", "job-master-0")
        assert not may(role, verb, "/serviceaccounts/token", "job-pods")
    for rule in role["rules"]:
        assert not {*rule["verbs"]} & {"*", "create", "update", "deletecollection", "escalate"}
        assert "*" not in (*rule["resources"], *rule["apiGroups"])
    for other in {*JOBS.values()} - {JOBS[kind]}:
        assert not may(role, "get", other, "job")


def test_pods_of_a_pytorchjob_are_deleted_by_their_names() -> None:
    role = role_of("pytorchjob", hosts=3)
    for pod in ("job-master-0", "job-worker-0", "job-worker-1"):
        assert may(role, "delete", "/pods", pod)
    for pod in ("", "job-worker-2", "other-master-0", "job-2-master-0"):
        assert not may(role, "delete", "/pods", pod)
    assert not may(role, "patch", "/pods/status", "job-master-0")
    alone = role_of("pytorchjob", hosts=1)
    assert may(alone, "delete", "/pods", "job-master-0")
    assert not may(alone, "delete", "/pods", "job-worker-0")


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_names_of_other_pods_are_not_known_beforehand(kind: Kind) -> None:
    assert may(role_of(kind), "delete", "/pods", "job-node-0-0-abcde")


@pytest.mark.parametrize("kind", KINDS)
def test_the_binding_is_of_the_account_that_pods_have(kind: Kind) -> None:
    made = objects(a_handover(PLAIN, kind), "team-a")
    (account,) = [one for one in made if one["kind"] == "ServiceAccount"]
    (binding,) = [one for one in made if one["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] == "job-pods"
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "team-a"}
    ]
    assert made[-1]["kind"].lower() == kind, "the job comes last"


def test_an_account_of_the_site_is_left_as_it_is() -> None:
    made = objects(CASES["pytorchjob-full"])
    assert FULL.service_account == "trainer"
    assert not {one["kind"] for one in made} & {"ServiceAccount", "Role", "RoleBinding"}

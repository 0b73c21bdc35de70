"""Kubernetes refuses a job or does not run its pods: ndctl explains the reason.

No pod of these jobs trains: each cannot start or sleeps.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from tests.kubernetes.e2e.person import NO_IMAGE, SLEEPS, Person, account, advised
from tests.kubernetes.testbed import CRDS, REPOSITORY, KubeTestbed

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.slow,
]
LEADER_S = 200.0
"""Time limit until the leader's first request; 3 s on an idle machine."""


@pytest.fixture
def admin(kube: KubeTestbed, tmp_path: Path) -> Person:
    account(kube)
    return Person(tmp_path / "runs", kube)


def test_an_image_that_cannot_be_pulled_is_explained(admin: Person) -> None:
    admin.submit_successfully(image=NO_IMAGE)
    shown = admin.wait_for_status("ImagePullBackOff")
    assert "0 of 2 pods run; pod e2e-master-0" in shown
    assert f'failed to pull and unpack image "{NO_IMAGE}": not found' in shown
    assert "cluster.kubernetes.image" in shown
    again = admin.submit(image=NO_IMAGE)
    assert again.code == exit_codes.BAD_JOB_STATE
    assert "waits, 0 of 2 pods run" in again.err

    cancelled = admin("cancel", "e2e")
    assert cancelled.code == 0, cancelled.err
    assert admin.pods() == {}
    assert admin.first_status_line().startswith("e2e: CANCELLED")
    assert (admin.job() or {})["spec"]["runPolicy"]["suspend"] is True


def test_too_few_free_gpus_are_explained(admin: Person) -> None:
    limits = {"limits": {"nvidia.com/gpu": "2"}}
    taken = {"name": "c", "image": "none", "command": ["sleep", "600"], "resources": limits}
    for name in admin.kube.nodes[1:]:
        other = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"other-{name}"}}
        admin.kube.apply({**other, "spec": {"nodeName": name, "containers": [taken]}})
    admin.submit_successfully(gpu_resource="nvidia.com/gpu", pod_template=SLEEPS)
    shown = admin.wait_for_status("Unschedulable")
    assert "1 of 2 pods run" in shown
    assert "Unschedulable (insufficient nvidia.com/gpu)" in shown
    assert "wait, or request less or fewer hosts" in shown
    admin.kube.kubectl("delete", "pod", "other-node2", "--force", "--grace-period=0")
    admin.kube.wait_for("both", lambda: list(admin.pods().values()) == ["Running"] * 2)


def test_a_quota_that_is_too_small_or_used_up_is_explained(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    person = Person(tmp_path / "runs", kube, kube.namespace("small"))
    account(kube, "small")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}}
    kube.apply({**quota, "spec": {"hard": {"pods": "1"}}}, namespace="small")
    refused = person.submit(pod_template=SLEEPS)
    assert refused.code == exit_codes.BACKEND
    assert (
        "cluster.hosts: must be such that 2 pods with 1 each fit into 1, the quota few's pods"
        in (refused.err)
    )
    assert person.job() is None

    kube.kubectl("patch", "quota", "few", "-n", "small", "-p", '{"spec":{"hard":{"pods":"2"}}}')
    other = {"name": "c", "image": "none", "command": ["sleep", "600"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}}
    kube.apply({**pod, "spec": {"containers": [other]}}, namespace="small")
    person.submit_successfully(pod_template=SLEEPS)
    shown = person.wait_for_status("exceeded quota: few")
    assert "1 of 2 pods run" in shown
    assert "`kubectl describe resourcequota` shows what is used" in shown


def test_a_namespace_whose_pod_security_refuses_pods_is_explained(
    admin: Person, kube: KubeTestbed
) -> None:
    level = "pod-security.kubernetes.io/enforce"
    kube.kubectl("label", "namespace", "default", f"{level}=baseline")
    try:
        refused = admin.submit(pod_template=SLEEPS)
        assert refused.code == exit_codes.BACKEND
        assert (
            "cluster.kubernetes.runs.host_path: must be unset: pods of namespace default must"
            " meet the standard baseline" in refused.err
        )
        assert f"kubectl label namespace default --overwrite {level}=privileged" in refused.err
        assert admin.job() is None
    finally:
        kube.kubectl("label", "namespace", "default", f"{level}-")
    admin.submit_successfully(pod_template=SLEEPS)


def test_a_missing_volume_claim_is_explained(admin: Person) -> None:
    wanted = {"runs__host_path": "", "runs__claim": "nowhere"}
    refused = admin.submit(**wanted)
    assert refused.code == exit_codes.BACKEND
    assert "cluster.kubernetes.runs.claim: must be a PersistentVolumeClaim" in refused.err
    assert "kubectl -n default get pvc" in refused.err
    assert admin.job() is None

    text = admin.run_root.with_name("job.yaml")
    text.write_text(admin.render(**wanted))
    admin.kube.kubectl("apply", "-f", str(text))  # kubectl does not check the claim.
    shown = admin.wait_for_status("Unschedulable")
    assert 'persistentvolumeclaim "nowhere" not found' in shown
    assert "create the PersistentVolumeClaim, or use another one" in shown


@pytest.fixture
def no_trainjobs(kube: KubeTestbed) -> Iterator[None]:
    name = "trainjobs.trainer.kubeflow.org"
    kube.kubectl("delete", "crd", name)
    yield
    crd = REPOSITORY / "manifests" / "crds" / f"{CRDS[name]}.yaml"
    kube.kubectl("create", "--validate=false", "-f", str(crd))
    kube.wait_for("the kind", lambda: kube.objects("trainjobs") == [])


@pytest.mark.usefixtures("no_trainjobs")
def test_a_cluster_without_the_operator_is_explained(admin: Person) -> None:
    done = admin.submit(kind="trainjob")
    assert done.code == exit_codes.BACKEND
    assert "trainjob: Kubeflow Trainer v2 is not installed" in done.err
    assert "cluster.kubernetes.kind=trainjob needs 2.0 or newer, with v1alpha1" in done.err
    assert "kubectl apply --server-side -k" in done.err
    assert not admin.kube.objects("configmaps", selector="ndctl.dev/job=e2e")


def test_a_leader_without_its_rights_names_them_and_who_grants_them(admin: Person) -> None:
    """The namespace has the account, but no Role is bound to it."""
    admin.submit_successfully()
    shown = admin.wait_for_status("may not", limit=LEADER_S)
    assert "pod e2e-master-0: Error: exit code 78" in shown
    assert "ndctl-job may not get pytorchjobs.kubeflow.org in namespace default" in shown
    role = "kubectl create role ndctl-get-pytorchjobs --verb=get,list,watch"
    assert f"{role} --resource=pytorchjobs.kubeflow.org -n default" in shown
    assert "--serviceaccount=default:ndctl-job -n default" in shown
    admin.kube.wait_for("its end", lambda: admin.pods()["e2e-master-0"] == "Failed")


USER: list[dict[str, object]] = [
    {
        "apiGroups": [""],
        "resources": ["configmaps", "secrets"],
        "verbs": ["get", "create", "patch"],
    },
    {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["get", "list", "watch"]},
]


def test_a_user_without_a_right_is_told_which_and_can_continue_with_it(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    account(kube)
    role = ("--verb=get,list", "--resource=nodes")
    kube.kubectl("create", "clusterrole", "test-nodes", *role)
    kube.kubectl(
        "create", "clusterrolebinding", "test-nodes", "--clusterrole=test-nodes", "--user=dev"
    )
    try:
        person = Person(tmp_path / "runs", kube, kubeconfig=kube.as_user(USER))
        errors = []
        while (done := person.submit(pod_template=SLEEPS)).code != 0:
            assert done.code == exit_codes.BACKEND, done.err
            errors.append(done.err)
            assert len(errors) < 2, "one error names everything that is missing"
            commands = advised(done.err)
            assert commands, done.err
            for command in commands:
                kube.kubectl(*command[1:])  # The error message suggests this.
        assert (
            "dev may not get/create/patch pytorchjobs.kubeflow.org, delete configmaps" in errors[0]
        )
        assert "create/patch networkpolicies.networking.k8s.io in namespace default" in errors[0]
        assert "kubectl create role ndctl-get-create-patch-pytorchjobs" in errors[0]
        assert "--user=dev -n default" in errors[0]
        assert person.job() is not None
    finally:
        kube.kubectl("delete", "clusterrole,clusterrolebinding", "test-nodes")

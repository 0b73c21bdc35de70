"""Jobs of the same name, and changes that a leader makes to its job, on a real API server."""

import sys

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.render import names, objects, spec_hash
from orchestrator.backends.kubernetes.resources import JOB_KINDS
from orchestrator.backends.kubernetes.status_cache import look
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError
from orchestrator.system import SystemClock
from tests.backends.kubernetes.rendered import CPU, a_handover
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]


def handover(kube: KubeTestbed, namespace: str, kind: Kind = "pytorchjob") -> Handover:
    return a_handover(replace(CPU, namespace=namespace, priority_class="absent"), kind)


def refusal_of(backend: KubernetesBackend, payload: Handover) -> str:
    """The refusal. It always names the absent PriorityClass, and perhaps more."""
    with pytest.raises(BackendError) as found:
        backend.check(payload)
    return found.value.message


def test_a_name_that_a_job_of_another_kind_has_is_refused(kube: KubeTestbed) -> None:
    """Both jobs would be launch 1 of the same run directory and write the same ConfigMap."""
    namespace = kube.namespace("names")
    backend = KubernetesBackend({"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    first = handover(kube, namespace)
    assert "PyTorchJob" not in refusal_of(backend, handover(kube, namespace, "jobset"))
    backend.submit(first)
    for kind in ("jobset", "trainjob"):
        message = refusal_of(backend, handover(kube, namespace, kind))
        assert f"a name that no PyTorchJob of namespace {namespace} has" in message
        assert "fix: use another name; that PyTorchJob, created at 20" in message
        assert f"has not ended: `ndctl status job -n {namespace}` shows" in message
        assert "delete" not in message, "the job may train"
    assert "that PyTorchJob" not in refusal_of(backend, first), (
        "a repeated submission is the same job"
    )
    backend.clear(first.launch)
    message = refusal_of(backend, handover(kube, namespace, "jobset"))
    assert f"`kubectl -n {namespace} delete pytorchjobs.kubeflow.org job` makes room" in message
    kube.kubectl("-n", namespace, "delete", "pytorchjob", "job")
    assert "PyTorchJob" not in refusal_of(backend, handover(kube, namespace, "jobset"))


def test_the_running_launch_is_noted_once_and_a_later_text_is_told_apart(kube: KubeTestbed) -> None:
    """`kubectl apply` keeps fields that are not in the manifest, such as the leader's notes."""
    namespace = kube.namespace("text")
    backend = KubernetesBackend({"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    payload = handover(kube, namespace)
    backend.submit(payload)

    def reports_unused_objects() -> bool:
        kind = JOB_KINDS["pytorchjob"]
        (seen,) = look(backend.api(KubernetesSpec()), namespace, kind, [payload.launch])
        return "applied objects not in use" in [one.what for one in seen.troubles]

    def apply_objects(text: Handover) -> None:
        for one in objects(text):
            backend.api(KubernetesSpec()).apply(one, namespace)

    backend.own(payload.launch, spec_hash(payload))
    assert not reports_unused_objects()
    apply_objects(replace(payload, spec="name: job\ntrain: {lr: 2}\n"))
    backend.own(payload.launch)
    assert reports_unused_objects()
    apply_objects(payload)
    assert not reports_unused_objects()


def test_excluded_nodes_get_no_pods_unless_the_cluster_cordoned_them(kube: KubeTestbed) -> None:
    namespace = kube.namespace("shut")
    backend = KubernetesBackend({"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    payload = handover(kube, namespace)
    backend.submit(payload)

    def excluded_nodes() -> tuple[str, str, bool]:
        """Excluded nodes as the job's pods request them, as the controller has noted them, and
        whether the pod template excludes nodes."""
        about = kube.get("configmaps", "job-launch", namespace)["metadata"]
        found = kube.get("pytorchjobs", "job", namespace)
        affinity = found["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"]
        asks = about.get("annotations", {}).get(names.AVOID_ANNOTATION, "")
        noted = found["metadata"]["annotations"].get(names.EXCLUDED_ANNOTATION, "")
        return asks, noted, "NotIn" in str(affinity)

    backend.replace(payload.launch, "node-1", elsewhere=True, shut=True)
    assert excluded_nodes() == ("", "", False)
    backend.replace(payload.launch, "node-1", elsewhere=True)
    assert excluded_nodes() == ("node-1", "", False), "only a controller changes the template"
    argv = [sys.executable, "-m", "orchestrator", "controller", "--once", "-n", namespace]
    done = kube(argv, timeout=120)
    assert done.code == 0, done.err
    assert excluded_nodes() == ("node-1", "node-1", True)

"""Objects of one name, and what a leader has changed of them, on a real API server."""

import sys
from dataclasses import replace

import pytest

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


def refused(backend: KubernetesBackend, asked: Handover) -> str:
    """For its class, which there is not, and perhaps for more."""
    with pytest.raises(BackendError) as found:
        backend.check(asked)
    return found.value.message


def test_a_name_that_a_job_of_another_kind_has_is_refused(kube: KubeTestbed) -> None:
    """Both would be launch 1 of one run directory, and write one ConfigMap."""
    namespace = kube.namespace("names")
    backend = KubernetesBackend({"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    first = handover(kube, namespace)
    assert "PyTorchJob" not in refused(backend, handover(kube, namespace, "jobset"))
    backend.submit(first)
    for kind in ("jobset", "trainjob"):
        said = refused(backend, handover(kube, namespace, kind))
        assert f"a name that no PyTorchJob of namespace {namespace} has" in said
        assert f"`kubectl -n {namespace} delete pytorchjobs.kubeflow.org job`" in said
    assert "delete pytorchjobs" not in refused(backend, first), "a submit again is none other"
    kube.kubectl("-n", namespace, "delete", "pytorchjob", "job")
    assert "PyTorchJob" not in refused(backend, handover(kube, namespace, "jobset"))


def test_the_running_launch_is_noted_once_and_a_later_text_is_told_apart(
    kube: KubeTestbed,
) -> None:
    """`kubectl apply` leaves what it does not know of."""
    namespace = kube.namespace("text")
    backend = KubernetesBackend({"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    asked = handover(kube, namespace)
    backend.submit(asked)

    def told() -> bool:
        kind = JOB_KINDS["pytorchjob"]
        (seen,) = look(backend.api(KubernetesSpec()), namespace, kind, [asked.launch])
        return "applied objects not in use" in [one.what for one in seen.troubles]

    def applied(text: Handover) -> None:
        for one in objects(text):
            backend.api(KubernetesSpec()).apply(one, namespace)

    backend.own(asked.launch, spec_hash(asked))
    assert not told()
    applied(replace(asked, spec="name: job\ntrain: {lr: 2}\n"))
    backend.own(asked.launch)
    assert told()
    applied(asked)
    assert not told()


def test_excluded_nodes_get_no_pods_unless_the_cluster_cordoned_them(kube: KubeTestbed) -> None:
    namespace = kube.namespace("shut")
    backend = KubernetesBackend({"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    asked = handover(kube, namespace)
    backend.submit(asked)

    def left_out() -> tuple[str, str, bool]:
        """As the job's pods ask for it, as the controller has noted it, and as pods are told."""
        about = kube.get("configmaps", "job-launch", namespace)["metadata"]
        found = kube.get("pytorchjobs", "job", namespace)
        affinity = found["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"]
        asks = about.get("annotations", {}).get(names.AVOID_ANNOTATION, "")
        noted = found["metadata"]["annotations"].get(names.EXCLUDED_ANNOTATION, "")
        return asks, noted, "NotIn" in str(affinity)

    backend.replace(asked.launch, "node-1", elsewhere=True, shut=True)
    assert left_out() == ("", "", False)
    backend.replace(asked.launch, "node-1", elsewhere=True)
    assert left_out() == ("node-1", "", False), "it takes a controller"
    argv = [sys.executable, "-m", "orchestrator", "controller", "--once", "-n", namespace]
    done = kube(argv, timeout=120)
    assert done.code == 0, done.err
    assert left_out() == ("node-1", "node-1", True)

"""A pod of a Job on a lost node is force-deleted: the Job controller of Kubernetes replaces it."""

from typing import Any

import pytest

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.controller.actions import Delete, Ref
from orchestrator.backends.kubernetes.controller.loop import perform
from orchestrator.backends.kubernetes.finalizers import failed
from orchestrator.backends.kubernetes.render.kinds import NO_LIMIT
from orchestrator.backends.kubernetes.resources import PODS
from orchestrator.system import SystemClock
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
LABELS = {"ndctl.dev/job": "job"}
SINCE = 26
"""The first minor version of the API server whose Jobs have a podFailurePolicy."""


def job() -> dict[str, Any]:
    """A Job like those in a JobSet of ndctl, with one pod."""
    main = {"name": "main", "image": "ndctl:1", "command": ["sh", "-c", "sleep 600"]}
    ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    spec = {
        "completionMode": "Indexed",
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": NO_LIMIT,
        "podFailurePolicy": {"rules": [ignore]},
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {"restartPolicy": "Never", "containers": [main]},
        },
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}


def running(kube: KubeTestbed) -> list[dict[str, Any]]:
    pods = kube.objects("pods", selector="ndctl.dev/job=job")
    return [pod for pod in pods if pod["status"]["phase"] == "Running"]


def test_a_job_releases_a_force_deleted_pod_and_makes_another(kube: KubeTestbed) -> None:
    if kube.minor_version < SINCE:
        pytest.skip(f"{kube.version} has no podFailurePolicy")
    kube.apply(job())
    try:
        kube.wait_for("its pod", lambda: running(kube))
        (pod,) = running(kube)
        host = pod["spec"]["nodeName"]
        kube.lose_node(host)
        api = Api(None, {"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
        # ndctl's controller does this; the account of a pod has no right to do it.
        perform(api, Delete(what=Ref.of(PODS, pod), reason="lost", grace_s=0, status=failed(pod)))
        old = pod["metadata"]["uid"]

        def replaced() -> bool:
            return [each["metadata"]["uid"] != old for each in running(kube)] == [True]

        kube.wait_for("exactly one new pod", replaced)
        # The podFailurePolicy ignores a disruption.
        status = kube.get("jobs.batch", "job")["status"]
        assert status.get("failed", 0) == 0
    finally:
        kube.kubectl("delete", "job", "job", "--wait=false")

"""Kubernetes' Job controller replaces failed pods of a rendered Job with a delay of their own.

The delay is 10 s after the first failure and doubles with each further one.
"""

import time
from typing import Any

import pytest
import yaml

from tests.kubernetes.testbed import REPOSITORY, KubeTestbed

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
SINCE = 29
"""The first minor version of the API server whose Jobs have a backoffLimitPerIndex."""
FIRST_DELAY_S = 8
"""The delay after the first failure is 10 s, less what rounding to whole seconds takes away."""
AFTER_THREE_S = 35
"""Less than the delay of 40 s after the third failure, if the controller counts the failures of all
pods together."""
INDEX = "batch.kubernetes.io/job-completion-index"
SELECTOR = "ndctl.dev/job=delayed"


def job() -> dict[str, Any]:
    """The Job in the JobSet of `manifests/examples`, with pods that only sleep."""
    text = (REPOSITORY / "manifests" / "examples" / "jobset.yaml").read_text()
    (jobset,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "JobSet")
    spec: dict[str, Any] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    name = spec["template"]["spec"]["containers"][0]["name"]
    container = {"name": name, "image": "ndctl:1", "command": ["sh", "-c", "sleep 3600"]}
    spec["template"] = {
        "metadata": {"labels": {"ndctl.dev/job": "delayed"}},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "delayed"}, "spec": spec}


def running(kube: KubeTestbed) -> dict[int, dict[str, Any]]:
    """Completion index to its running pod."""
    pods = kube.objects("pods", selector=SELECTOR)
    return {
        int(pod["metadata"]["labels"][INDEX]): pod
        for pod in pods
        if pod["status"].get("phase") == "Running"
    }


def evict_and_wait(kube: KubeTestbed, index: int) -> float:
    """Evicts the pod with this index. Returns the seconds until its successor runs."""
    old = running(kube)[index]["metadata"]
    began = time.monotonic()
    kube.evict(old["name"])

    def is_replaced() -> bool:
        found = running(kube).get(index)
        return found is not None and found["metadata"]["uid"] != old["uid"]

    kube.wait_for(f"a new pod with index {index}", is_replaced)
    return time.monotonic() - began


def test_failures_of_other_pods_do_not_delay_a_replacement(kube: KubeTestbed) -> None:
    if kube.minor_version < SINCE:
        pytest.skip(f"{kube.version} has no backoffLimitPerIndex")
    kube.apply(job())
    try:
        kube.wait_for("both pods", lambda: len(running(kube)) == 2)
        first, second = evict_and_wait(kube, 0), evict_and_wait(kube, 0)
        assert FIRST_DELAY_S <= first < second
        assert FIRST_DELAY_S <= evict_and_wait(kube, 1) < AFTER_THREE_S
    finally:
        kube.kubectl("delete", "job", "delayed", "--wait=false")

"""`ndctl controller` on a real API server. The pods of its jobs only sleep."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.controller.pod_requests import digest_of
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.topology import affinity
from orchestrator.backends.kubernetes.resources import JOB_KINDS, owner_reference
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.system import SystemClock
from tests.backends.kubernetes.rendered import a_launch
from tests.kubernetes.testbed import KubeTestbed
from tests.manifests.examples import ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]

ACCOUNT = "system:serviceaccount:ndctl:ndctl-controller"
LEASE_S = 6
COMMAND = [sys.executable, "-m", "orchestrator", "controller", "--lease-duration", str(LEASE_S)]
HOSTS = 3
ALLOWED = (
    *("patch pytorchjobs.kubeflow.org", "create pods", "delete pods", "watch nodes"),
    *("list configmaps", "delete configmaps", "delete serviceaccounts", "delete roles"),
)
FORBIDDEN = (
    *(f"{verb} secrets" for verb in ("get", "list", "create", "delete", "deletecollection")),
    *("patch configmaps", "patch roles", "create rolebindings"),
    *("patch nodes", "delete jobsets", "deletecollection pods"),
)
Object = dict[str, Any]


def job() -> Object:
    """A PyTorchJob whose pods all run on different nodes."""
    labels = names.labels_of_job("job")
    own = {"labelSelector": {"matchLabels": {names.JOB_LABEL: "job"}}}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [{**own, "topologyKey": HOSTNAME}]}
    script = ["sh", "-c", 'trap "exit 212" TERM; sleep 600 & wait']
    pod = {
        "affinity": {"podAntiAffinity": apart},
        "containers": [{"name": "pytorch", "image": "ndctl:1", "command": script}],
    }
    about = {"labels": labels, "annotations": {names.FORCE_ANNOTATION: "1"}}
    replica = {"restartPolicy": "ExitCode", "template": {"metadata": about, "spec": pod}}
    kinds = {"Master": {"replicas": 1, **replica}, "Worker": {"replicas": HOSTS - 1, **replica}}
    note = {names.LAUNCH_ANNOTATION: "1"}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "job", "labels": labels, "annotations": note},
        "spec": {"nprocPerNode": "2", "pytorchReplicaSpecs": kinds},
    }


def jobset() -> Object:
    """A JobSet of two pods with the affinity of ndctl's own pods."""
    launch = a_launch(KubernetesSpec(kind="jobset", image="ndctl:1"))
    script = ["python3", "-c", "import time; time.sleep(600)"]
    pod = {
        "restartPolicy": "Never",
        "affinity": affinity(launch, KubernetesSpec(kind="jobset")),
        "containers": [{"name": "pytorch", "image": "ndctl:1", "command": script}],
    }
    labels = names.labels_of_job("job")
    work = {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": "job",
            "labels": labels,
            "annotations": {names.LAUNCH_ANNOTATION: "1"},
        },
        "spec": {"replicatedJobs": [{"name": "node", "template": {"spec": work}}]},
    }


HOSTNAME = "kubernetes.io/hostname"
SELECTED = f"{names.JOB_LABEL}=job"


def nodes_of_pods(kube: KubeTestbed, namespace: str) -> dict[str, str]:
    """Uid to node of each running pod of the job that is not being deleted."""
    return {
        it["metadata"]["uid"]: it["spec"]["nodeName"]
        for it in kube.objects("pods", namespace, SELECTED)
        if it["status"].get("phase") == "Running" and "deletionTimestamp" not in it["metadata"]
    }


def wait_until_running(kube: KubeTestbed, namespace: str) -> dict[str, str]:
    kube.wait_for("all pods", lambda: len(nodes_of_pods(kube, namespace)) == HOSTS, 300)
    return nodes_of_pods(kube, namespace)


def apply(kube: KubeTestbed, body: Object, namespace: str = "default") -> None:
    """Creates a job and the ConfigMap that its pods may write; the job owns the ConfigMap."""
    kube.apply(body, namespace=namespace)
    kind = next(one for one in JOB_KINDS.values() if one.resource.kind == body["kind"])
    there = kube.get(kind.resource.word, "job", namespace)
    labels, owner = names.labels_of_job("job"), [owner_reference(kind.resource, there)]
    about = {"name": "job-launch", "labels": labels, "ownerReferences": owner}
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about}, namespace=namespace)


def job_annotations(kube: KubeTestbed, namespace: str) -> dict[str, str]:
    found: dict[str, str] = kube.get("pytorchjobs", "job", namespace)["metadata"]["annotations"]
    return found


def requests_of_pods(kube: KubeTestbed, namespace: str) -> dict[str, str]:
    """Requests that pods wrote into the ConfigMap."""
    about = kube.get("configmaps", "job-launch", namespace)["metadata"]
    found: dict[str, str] = about.get("annotations", {})
    return found


def request_restart(kube: KubeTestbed, namespace: str, *exclude: str) -> None:
    """Writes a request for new pods as a person would with kubectl."""
    request = json.dumps({"by": "ada", "at": time.time(), "exclude": exclude})
    note = f"{names.GANG_ANNOTATION}={request}"
    kube.kubectl("annotate", "configmap", "job-launch", note, "--overwrite", "-n", namespace)


def wait_for_restart(kube: KubeTestbed, namespace: str, times: int) -> None:
    def done() -> bool:
        annotations, text = (
            job_annotations(kube, namespace),
            requests_of_pods(kube, namespace)[names.GANG_ANNOTATION],
        )
        counted = annotations.get(names.RESTARTS_ANNOTATION) == str(times)
        return counted and annotations.get(names.RESTARTED_ANNOTATION) == digest_of(text)

    kube.wait_for(f"restart {times}", done, 300)


def lease_holder(kube: KubeTestbed, namespace: str) -> str:
    """Holder of the Lease, without the process id; empty if it has no holder."""
    spec = kube.get("leases.coordination.k8s.io", "ndctl-controller", namespace)["spec"]
    return str(spec["holderIdentity"]).rpartition("-")[0]


def deploy_controller(kube: KubeTestbed) -> None:
    """Deploys the controller with kustomize; its command is that of this machine."""
    kube.kubectl("apply", "-k", str(ROOT / "manifests" / "base"))
    body = kube.kubectl("kustomize", str(ROOT / "manifests" / "controller"))
    objects = list(yaml.safe_load_all(body))
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["command"] = COMMAND
    place = kube.folder / "controller.yaml"
    place.write_text(yaml.safe_dump_all(objects))
    kube.kubectl("apply", "-f", str(place))


def test_two_controllers_restart_a_job_and_survive_loss_of_a_node_and_the_api_server(
    kube: KubeTestbed,
) -> None:
    deploy_controller(kube)
    apply(kube, job(), "ndctl")
    for words in (*ALLOWED, *FORBIDDEN):
        argv = ["kubectl", "auth", "can-i", *words.split(), "-n", "ndctl", f"--as={ACCOUNT}"]
        assert kube(argv).out.strip() == ("yes" if words in ALLOWED else "no"), words
    before = wait_until_running(kube, "ndctl")
    kube.wait_for("a leader", lambda: lease_holder(kube, "ndctl"))
    first = lease_holder(kube, "ndctl")
    active_node = kube.get("pods", first, "ndctl")["spec"]["nodeName"]
    excluded = next(node for node in before.values() if node != active_node)

    request_restart(kube, "ndctl", excluded)
    wait_for_restart(kube, "ndctl", 1)
    after = wait_until_running(kube, "ndctl")
    assert not before.keys() & after.keys()
    assert set(after.values()) == {*kube.nodes} - {excluded}
    log = kube.kubectl("logs", first, "-n", "ndctl")
    assert (
        f"suspend PyTorchJob ndctl/job: ada requests new pods in place of all, not on {excluded}"
        in log
    )
    assert f"keep new pods of PyTorchJob ndctl/job off {excluded}: its pods requested it" in log

    kube.lose_node(active_node)  # The active controller runs there, and a pod of the job.
    (lost,) = (uid for uid, node in after.items() if node == active_node)
    pods = kube.objects("pods", "ndctl", SELECTED)
    (name,) = (it["metadata"]["name"] for it in pods if it["metadata"]["uid"] == lost)
    kube.kubectl("delete", "pod", name, "-n", "ndctl", "--wait=false")
    kube.wait_for("another leader", lambda: lease_holder(kube, "ndctl") not in (first, ""))

    def gone() -> bool:
        return lost not in {it["metadata"]["uid"] for it in kube.objects("pods", "ndctl")}

    kube.wait_for("the pod to be force-deleted", gone)
    second = lease_holder(kube, "ndctl")
    log = kube.kubectl("logs", second, "-n", "ndctl")
    assert f"delete Pod ndctl/{name} by force: {active_node} is unreachable" in log

    kube.restore_node(active_node)
    wait_until_running(kube, "ndctl")
    kube.restart_api_server()
    request_restart(kube, "ndctl")
    wait_for_restart(kube, "ndctl", 2)
    assert excluded not in wait_until_running(kube, "ndctl").values()


@contextlib.contextmanager
def controller(kube: KubeTestbed, *args: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(
        [*COMMAND, *args], env=kube.environ, cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def stop(process: "subprocess.Popen[str]") -> str:
    """Ends the controller with SIGTERM and returns its log."""
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    return log


def launch_plan() -> LaunchPlan:
    return a_launch(KubernetesSpec(namespace="default"))


def test_a_leader_asks_a_controller_and_restarts_alone_without_one(kube: KubeTestbed) -> None:
    apply(kube, job())
    before = wait_until_running(kube, "default")
    backend = KubernetesBackend({"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    with controller(kube, "--taint") as process:
        kube.wait_for(
            "the controller's annotation",
            lambda: names.CONTROLLER_ANNOTATION in job_annotations(kube, "default"),
        )
        excluded = min(before.values())
        backend.requeue(launch_plan(), [excluded])
        wait_for_restart(kube, "default", 1)
        after = wait_until_running(kube, "default")
        assert not before.keys() & after.keys()
        assert excluded not in after.values()
        taint = {"key": "ndctl.dev/excluded", "effect": "NoSchedule"}

        def taints() -> list[Object]:
            found: list[Object] = kube.get("nodes", excluded)["spec"].get("taints", [])
            return found

        kube.wait_for("a taint", lambda: taint in taints())
        kube.kubectl("delete", "pytorchjob", "job")
        kube.wait_for("no taint", lambda: not taints())
        log = stop(process)
    assert log.count("PyTorchJob default/job") == 4, "adopt, exclude, suspend, resume"
    sent = int(log.rpartition(" requests were sent")[0].split()[-1])
    assert sent < 60, log
    kube.wait_for("no pods", lambda: not kube.objects("pods"))
    assert lease_holder(kube, "default") == ""

    without_controller = job()
    without_controller["metadata"]["annotations"][names.CONTROLLER_ANNOTATION] = "default"
    kube.wait_for("no ConfigMap", lambda: not kube.objects("configmaps", selector=SELECTED))
    apply(kube, without_controller)
    before = wait_until_running(kube, "default")
    backend.requeue(launch_plan(), ["node9"])
    written = {names.REQUEUES_ANNOTATION: "1", names.AVOID_ANNOTATION: "node9"}
    assert requests_of_pods(kube, "default") == written, "a controller would carry it out later"
    assert not before.keys() & wait_until_running(kube, "default").keys()


def test_the_option_once_carries_out_requests_and_exits(kube: KubeTestbed) -> None:
    apply(kube, job())
    before = wait_until_running(kube, "default")
    request_restart(kube, "default")
    with controller(kube, "--once") as process:
        _, log = process.communicate(timeout=300)
        assert process.returncode == 0, log
    assert job_annotations(kube, "default")[names.RESTARTS_ANNOTATION] == "1"
    assert not before.keys() & wait_until_running(kube, "default").keys()


def test_a_placeholder_keeps_the_pods_of_a_jobset_off_a_node_that_it_left_out(
    kube: KubeTestbed,
) -> None:
    apply(kube, jobset())
    kube.wait_for("both pods", lambda: len(nodes_of_pods(kube, "default")) == 2, 300)
    first, excluded = nodes_of_pods(kube, "default").values()
    spare, *_ = others = [node for node in kube.nodes if node not in (first, excluded)]
    kube.kubectl("cordon", *others)
    kind = "jobsets.jobset.x-k8s.io"
    with controller(kube) as process:

        def is_adopted() -> bool:
            found = kube.get(kind, "job", "default")["metadata"]["annotations"]
            return names.CONTROLLER_ANNOTATION in found

        kube.wait_for("the controller's annotation", is_adopted)
        launch = a_launch(KubernetesSpec(namespace="default", kind="jobset"))
        backend = KubernetesBackend({"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
        backend.replace(launch, excluded, elsewhere=True)

        def placeholders() -> dict[str, str]:
            """Node to the phase of its placeholder pod."""
            found = kube.objects("pods", "default", f"{names.KEEPS_OFF_LABEL}=job")
            return {it["spec"]["nodeName"]: it["status"].get("phase", "Pending") for it in found}

        kube.wait_for("a placeholder", lambda: placeholders() == {excluded: "Running"}, 300)

        def why() -> str:
            conditions = [
                each
                for it in kube.objects("pods", "default", SELECTED)
                for each in it["status"].get("conditions", ())
            ]
            return " ".join(str(it.get("message")) for it in conditions)

        kube.wait_for("the new pod to be unschedulable", lambda: "anti-affinity" in why(), 300)
        kube.kubectl("uncordon", spare)
        kube.wait_for(
            "another node",
            lambda: set(nodes_of_pods(kube, "default").values()) == {first, spare},
            300,
        )
        kube.kubectl("annotate", kind, "job", f"{names.CANCELLED_ANNOTATION}=ada")
        kube.wait_for("no placeholder", lambda: not placeholders(), 300)
        log = stop(process)
    assert "create Pod default/job-not-on-" in log
    assert f"job default/job excluded {excluded}, and its pods cannot be changed" in log

"""The Kubernetes testbed works as its users expect."""

from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, stream

from tests.kubernetes.testbed import KubeTestbed
from tests.testbeds import TestbedError

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
Object = dict[str, Any]


def container(name: str, script: str, **more: object) -> Object:
    return {"name": name, "image": "ndctl:1", "command": ["sh", "-c", script], **more}


def job(script: str, workers: int = 1, *, pod: Object | None = None, **policy: object) -> Object:
    spec = {"containers": [container("pytorch", script)], **(pod or {})}
    replica = {"restartPolicy": "ExitCode", "template": {"spec": spec}}
    kinds = {"Master": {"replicas": 1, **replica}, "Worker": {"replicas": workers, **replica}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "job"},
        "spec": {"nprocPerNode": "2", "pytorchReplicaSpecs": kinds, "runPolicy": policy},
    }


def pod(script: str, **spec: object) -> Object:
    inner = {"containers": [container("main", script)], "restartPolicy": "Never", **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": inner}


def wait_for_job(kube: KubeTestbed, condition: str) -> None:
    kube.wait_for(condition, lambda: condition in kube.conditions("pytorchjobs", "job"))


def wait_until_running(kube: KubeTestbed, count: int = 1) -> None:
    def up() -> bool:
        return list(kube.phases().values()) == ["Running"] * count

    kube.wait_for(f"{count} running pods", up)


def uids(kube: KubeTestbed) -> dict[str, str]:
    return {it["metadata"]["name"]: it["metadata"]["uid"] for it in kube.objects("pods")}


def test_a_job_runs_to_its_end_with_the_operators_environment(kube: KubeTestbed) -> None:
    kube.apply(job("echo $RANK/$PET_NNODES; getent hosts $MASTER_ADDR | grep -q 127. "))
    wait_for_job(kube, "Succeeded")
    output = [kube.kubectl("logs", f"job-{it}") for it in ("master-0", "worker-0")]
    assert output == ["0/2", "1/2"]


@pytest.mark.parametrize(("code", "condition"), [(3, "Failed"), (211, "Restarting")])
def test_exit_codes_from_128_on_are_retried(kube: KubeTestbed, code: int, condition: str) -> None:
    kube.apply(job(f'[ $RANK = 0 ] || exit {code}; trap "exit 0" TERM; sleep 600 & wait'))
    kube.wait_for("the worker's end", lambda: condition in conditions_so_far(kube))


def conditions_so_far(kube: KubeTestbed) -> set[str]:
    """Types of all conditions of the job, also those that are false now."""
    status = kube.get("pytorchjobs", "job").get("status", {})
    return {it["type"] for it in status.get("conditions", ())}


def test_a_deleted_pod_is_recreated(kube: KubeTestbed) -> None:
    kube.apply(job('trap "exit 0" TERM; sleep 600 & wait'))
    wait_until_running(kube, 2)
    before = uids(kube)
    kube.kubectl("delete", "pod", "job-worker-0")
    kube.wait_for("its successor", lambda: len(uids(kube).items() - before.items()) == 1)
    wait_until_running(kube, 2)
    assert uids(kube)["job-master-0"] == before["job-master-0"]


def test_suspension_deletes_all_pods_and_ends(kube: KubeTestbed) -> None:
    kube.apply(job('trap "exit 0" TERM; sleep 600 & wait'))
    wait_until_running(kube, 2)
    for suspend in ("true", "false"):
        output = f'{{"spec":{{"runPolicy":{{"suspend":{suspend}}}}}}}'
        kube.kubectl("patch", "pytorchjob", "job", "--type=merge", "-p", output)
        if suspend == "true":
            kube.wait_for("no pods", lambda: not kube.objects("pods"))
            wait_for_job(kube, "Suspended")
    wait_until_running(kube, 2)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_jobs_of_the_other_kinds_run(kube: KubeTestbed, kind: str) -> None:
    script = "echo $JOB_COMPLETION_INDEX; getent hosts job-node-0-0.job"
    command = container("node", script)
    inner = {"completions": 2, "parallelism": 2, "completionMode": "Indexed"}
    template = {"spec": {"restartPolicy": "Never", "containers": [command]}}
    replicated = {"name": "node", "template": {"spec": {**inner, "template": template}}}
    trainer = {"numNodes": 2, "image": "ndctl:1", "command": command["command"]}
    version, spec = {
        "jobset": ("jobset.x-k8s.io/v1alpha2", {"replicatedJobs": [replicated]}),
        "trainjob": (
            "trainer.kubeflow.org/v1alpha1",
            {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
        ),
    }[kind]
    name = {"jobset": "JobSet", "trainjob": "TrainJob"}[kind]
    kube.apply({"apiVersion": version, "kind": name, "metadata": {"name": "job"}, "spec": spec})
    done = {"jobset": "Completed", "trainjob": "Complete"}[kind]
    kube.wait_for(done, lambda: done in kube.conditions(f"{kind}s", "job"))
    # On a busy machine the controller may have replaced a pod that it did not see yet.
    index = "batch.kubernetes.io/job-completion-index"
    succeeded = [pod for pod in kube.objects("pods") if pod["status"]["phase"] == "Succeeded"]
    assert {pod["metadata"]["annotations"][index] for pod in succeeded} == {"0", "1"}


def test_volumes_and_values_come_from_the_api(kube: KubeTestbed) -> None:
    kube.kubectl("create", "configmap", "settings", "--from-literal=a=1")
    kube.kubectl("create", "secret", "generic", "token", "--from-literal=token=xyz")
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    named = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}}
    kube.apply({**named, "spec": {**claim, "storageClassName": ""}})
    script = "cat /etc/ndctl/x/a; echo $TOKEN $NODE; echo kept > /ndctl/runs/file; touch /ndctl/x"
    asked = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    places = [
        {"name": "settings", "mountPath": "/etc/ndctl/x"},
        {"name": "runs", "mountPath": "/ndctl/runs"},
    ]
    volumes = [
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    main = container("main", script, env=asked, volumeMounts=places)
    kube.apply(pod("", containers=[main], volumes=volumes, nodeName="node3"))
    kube.wait_for("its end", lambda: kube.phases() == {"pod": "Succeeded"})
    assert kube.kubectl("logs", "pod") == "1xyz node3"
    assert (kube.folder / "claims" / "default" / "runs" / "file").read_text() == "kept\n"
    assert not Path("/ndctl/x").exists()


def execute(kube: KubeTestbed, script: str) -> tuple[str, int]:
    with kube.client as api:
        session = stream.stream(
            client.CoreV1Api(api).connect_get_namespaced_pod_exec,
            *("pod", "default"),
            command=["sh", "-c", script],
            stdout=True,
            stderr=True,
            _preload_content=False,
        )
        session.run_forever(timeout=240)
        output = session.read_stdout().strip(), session.returncode
        session.sock.shutdown()  # close() leaves the socket open if the server closed it first.
        return output


def test_exec_works_and_a_log_can_be_followed(kube: KubeTestbed) -> None:
    go = kube.folder / "go"  # A container has this machine's /tmp.
    kube.apply(pod(f"until [ -e {go} ]; do sleep 0.1; done; echo gone"))
    wait_until_running(kube)
    assert execute(kube, "hostname; exit 3") == ("pod", 3)
    execute(kube, f"touch {go}")
    assert kube.kubectl("logs", "-f", "pod") == "gone"


def test_a_pod_on_a_lost_node_terminates_until_it_is_force_deleted(kube: KubeTestbed) -> None:
    kube.apply(pod("sleep 600", nodeName="node2"))
    wait_until_running(kube)
    pids = kube.pids("pod")
    kube.lose_node("node2")
    kube.wait_for("no process", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    kube.kubectl("delete", "pod", "pod", "--wait=false")
    with pytest.raises(TestbedError, match="waited 2 s"):
        kube.wait_for("no pod", lambda: not kube.objects("pods"), timeout=2)
    kube.restore_node("node2")
    kube.wait_for("no pod", lambda: not kube.objects("pods"))


def test_more_gpus_than_a_node_has_are_unschedulable(kube: KubeTestbed) -> None:
    limits = {"limits": {"nvidia.com/gpu": "3"}}
    kube.apply(pod("", containers=[container("main", "true", resources=limits)]))

    def message() -> str:
        # The pod has no condition before the scheduler has looked at it.
        output = kube.get("pods", "pod")["status"].get("conditions")
        return str(output[0]["message"]) if output else ""

    kube.wait_for("the scheduler", lambda: "4 Insufficient nvidia.com/gpu" in message())


def test_a_missing_image_and_a_killed_container_have_their_reasons(kube: KubeTestbed) -> None:
    kube.apply(pod("sleep 600"))
    wait_until_running(kube)
    kube.oom("pod")
    kube.wait_for("the end", lambda: kube.phases() == {"pod": "Failed"})
    ended = kube.get("pods", "pod")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    kube.kubectl("delete", "pod", "pod")
    kube.apply(pod("", containers=[{**container("main", "true"), "image": "x/missing:1"}]))
    state = "{.items[0].status.containerStatuses[0].state.waiting.reason}"
    asked = ("get", "pods", "-o", f"jsonpath={state}")
    kube.wait_for("the back-off", lambda: kube.kubectl(*asked) == "ImagePullBackOff")


@pytest.mark.slow
def test_processes_survive_an_api_server_restart_and_are_reported_after_it(
    kube: KubeTestbed,
) -> None:
    shared = {"name": "shared", "hostPath": {"path": str(kube.runs)}}
    wait = "until [ -e /shared/go ]; do sleep 0.1; done"
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    main = container("main", wait, volumeMounts=mounts)
    kube.apply(pod("", containers=[main], volumes=[shared]))
    wait_until_running(kube)
    kube.stop_control_plane()
    (kube.runs / "go").touch()
    kube.start_control_plane()
    kube.wait_for("its end", lambda: kube.phases() == {"pod": "Succeeded"})

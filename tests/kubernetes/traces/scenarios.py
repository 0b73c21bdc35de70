"""The scenarios that are recorded: a PyTorchJob of three pods, and what happens to it.

Each pod runs a shell script that waits for a file with its exit code. No code of ndctl runs in it.
"""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.kubernetes.standins.api import Object
from tests.kubernetes.testbed import KubeTestbed

NAMESPACE = "default"
JOB = "job"
MASTER, WORKER_0, WORKER_1 = (f"{JOB}-{rest}" for rest in ("master-0", "worker-0", "worker-1"))
PODS = (MASTER, WORKER_0, WORKER_1)


@dataclass
class JobUnderTest:
    """The job on the testbed, as an action sees it."""

    kube: KubeTestbed
    before: dict[str, str]
    """Pod to its uid when the present action started."""

    def uids(self) -> dict[str, str]:
        found = self.kube.objects("pods", NAMESPACE)
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

    def phases(self) -> dict[str, str]:
        return self.kube.phases(namespace=NAMESPACE)

    def has_condition(self, condition: str) -> bool:
        return condition in self.kube.conditions("pytorchjobs", JOB, NAMESPACE)

    def all_run(self) -> bool:
        return self.phases() == dict.fromkeys(PODS, "Running") and self.has_condition("Running")

    def were_recreated(self, *pods: str) -> bool:
        """Whether exactly these pods were created again, and all pods run."""
        now = self.uids()
        changed = {name for name in PODS if self.before.get(name) != now.get(name)}
        return changed == set(pods) and self.all_run()

    def end_process(self, pod: str, code: int) -> None:
        """Makes the pod's process exit with `code`."""
        (self.kube.runs / f"end-{pod}").write_text(f"{code}\n")

    def suspend(self, suspended: bool) -> None:
        patch = f'{{"spec":{{"runPolicy":{{"suspend":{str(suspended).lower()}}}}}}}'
        words = ("patch", "pytorchjob", JOB, "-n", NAMESPACE, "--type=merge", "-p", patch)
        self.kube.kubectl(*words)

    def delete(self, *words: str) -> None:
        self.kube.kubectl("delete", *words, "-n", NAMESPACE, "--wait=false")

    def node_of(self, pod: str) -> str:
        name: str = self.kube.get("pods", pod, NAMESPACE)["spec"]["nodeName"]
        return name


@dataclass(frozen=True)
class Action:
    description: str
    perform: Callable[[JobUnderTest], object]
    is_settled: Callable[[JobUnderTest], bool]
    """Whether the operator has reacted. The recording then waits until nothing changes."""


@dataclass(frozen=True)
class Scenario:
    name: str
    actions: Sequence[Action]
    policy: str = "ExitCode"
    clean: str = "Running"


def job(tested: JobUnderTest, scenario: Scenario) -> Object:
    """A master and two workers; each waits for the file with its exit code."""
    code_file = "/exit-codes/end-$(hostname)"
    script = (
        f"trap 'exit 143' TERM; while [ ! -e {code_file} ]; do sleep 0.2; done; "
        f"read code < {code_file}; rm {code_file}; exit $code"
    )
    ports = [{"name": "pytorchjob-port", "containerPort": 29500}]
    command = {"image": "ndctl:1", "command": ["sh", "-c", script], "ports": ports}
    mounts = [{"name": "exit-codes", "mountPath": "/exit-codes"}]
    own = [{"name": "OWN", "value": "first"}]
    template = {
        "metadata": {"labels": {"mine": "yes"}, "annotations": {"noted": "too"}},
        "spec": {
            "containers": [{"name": "pytorch", **command, "env": own, "volumeMounts": mounts}],
            "volumes": [{"name": "exit-codes", "hostPath": {"path": str(tested.kube.runs)}}],
            "terminationGracePeriodSeconds": 20,
        },
    }
    replica = {"restartPolicy": scenario.policy, "template": template}
    kinds = {"Master": {"replicas": 1, **replica}, "Worker": {"replicas": 2, **replica}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": JOB},
        "spec": {
            "nprocPerNode": "2",
            "pytorchReplicaSpecs": kinds,
            "runPolicy": {"cleanPodPolicy": scenario.clean},
        },
    }


def _kill_process(pod: str) -> Callable[[JobUnderTest], None]:
    def perform(tested: JobUnderTest) -> None:
        os.kill(tested.kube.pids(pod, NAMESPACE)[0], signal.SIGKILL)

    return perform


def _lose_node_and_delete_pod(tested: JobUnderTest) -> None:
    tested.kube.lose_node(tested.node_of(WORKER_0))
    tested.delete("pod", WORKER_0)


def _terminating(tested: JobUnderTest) -> bool:
    return "deletionTimestamp" in tested.kube.get("pods", WORKER_0, NAMESPACE)["metadata"]


def _has_no_pods(tested: JobUnderTest) -> bool:
    return not tested.uids()


def _ended(condition: str, *left: str) -> Callable[[JobUnderTest], bool]:
    return lambda tested: tested.has_condition(condition) and set(tested.uids()) == set(left)


def _recreated(*pods: str) -> Callable[[JobUnderTest], bool]:
    return lambda tested: tested.were_recreated(*pods)


JOB_IS_CREATED = "the job is made"


def start_job(scenario: Scenario) -> Action:
    """The first action of every scenario."""
    return Action(
        JOB_IS_CREATED,
        lambda tested: tested.kube.apply(job(tested, scenario), namespace=NAMESPACE),
        lambda tested: tested.all_run(),
    )


FORCED = ("--force", "--grace-period=0")
SCENARIOS = (
    Scenario(
        "master-ends-well",
        [
            Action(
                "the master ends with 0",
                lambda tested: tested.end_process(MASTER, 0),
                _ended("Succeeded", MASTER),
            ),
        ],
    ),
    Scenario(
        "master-ends-well-and-no-pod-is-cleaned",
        [
            Action(
                "the master ends with 0",
                lambda tested: tested.end_process(MASTER, 0),
                _ended("Succeeded", *PODS),
            ),
        ],
        clean="None",
    ),
    Scenario(
        "worker-ends-with-211",
        [
            Action(
                "a worker ends with 211",
                lambda tested: tested.end_process(WORKER_1, 211),
                _recreated(WORKER_1),
            ),
        ],
    ),
    Scenario(
        "worker-ends-with-3",
        [
            Action(
                "a worker ends with 3",
                lambda tested: tested.end_process(WORKER_1, 3),
                _ended("Failed", WORKER_1),
            ),
        ],
    ),
    Scenario(
        "processes-are-killed",
        [
            Action("a worker's process is killed", _kill_process(WORKER_0), _recreated(WORKER_0)),
            Action("the master's process is killed", _kill_process(MASTER), _recreated(MASTER)),
        ],
    ),
    Scenario(
        "pods-are-deleted",
        [
            Action(
                "a worker is deleted",
                lambda tested: tested.delete("pod", WORKER_0),
                _recreated(WORKER_0),
            ),
            Action(
                "the master is deleted",
                lambda tested: tested.delete("pod", MASTER),
                _recreated(MASTER),
            ),
        ],
    ),
    Scenario(
        "node-is-lost",
        [
            Action(
                "a worker's node is lost, and its pod is deleted",
                _lose_node_and_delete_pod,
                _terminating,
            ),
            Action(
                "that pod is deleted by force",
                lambda tested: tested.delete("pod", WORKER_0, *FORCED),
                _recreated(WORKER_0),
            ),
        ],
    ),
    Scenario(
        "suspended-and-resumed",
        [
            Action(
                "the job is suspended",
                lambda tested: tested.suspend(True),
                lambda tested: tested.has_condition("Suspended") and _has_no_pods(tested),
            ),
            Action("the job is resumed", lambda tested: tested.suspend(False), _recreated(*PODS)),
        ],
    ),
    Scenario(
        "worker-fails-under-on-failure",
        [
            Action(
                "a worker is evicted",
                lambda tested: tested.kube.evict(WORKER_1),
                _recreated(WORKER_1),
            ),
        ],
        policy="OnFailure",
    ),
    Scenario(
        "job-is-deleted",
        [
            Action(
                "the job is deleted", lambda tested: tested.delete("pytorchjob", JOB), _has_no_pods
            ),
        ],
    ),
)

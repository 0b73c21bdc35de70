"""What is done to a job while an operator's doings are recorded: a few pods that wait to be told
how to end, and what happens to them. No code of ours runs in them."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.kubernetes.standins.api import Object
from tests.kubernetes.testbed import KubeTestbed

NAMESPACE = "default"
JOB = "job"
MASTER, FIRST, SECOND = (f"{JOB}-{rest}" for rest in ("master-0", "worker-0", "worker-1"))
PODS = (MASTER, FIRST, SECOND)


@dataclass
class Bed:
    """The job on the testbed, as an act and what it waits for see it."""

    kube: KubeTestbed
    before: dict[str, str]
    """Pods' uids when the present act began."""

    def uids(self) -> dict[str, str]:
        found = self.kube.objects("pods", NAMESPACE)
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

    def phases(self) -> dict[str, str]:
        return self.kube.phases(namespace=NAMESPACE)

    def holds(self, condition: str) -> bool:
        return condition in self.kube.conditions("pytorchjobs", JOB, NAMESPACE)

    def all_run(self) -> bool:
        return self.phases() == dict.fromkeys(PODS, "Running") and self.holds("Running")

    def anew(self, *pods: str) -> bool:
        """These were made again, and no others; all run."""
        now = self.uids()
        changed = {name for name in PODS if self.before.get(name) != now.get(name)}
        return changed == set(pods) and self.all_run()

    def ends(self, pod: str, code: int) -> None:
        """The pod's process ends by itself."""
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
class Act:
    does: str
    do: Callable[[Bed], object]
    settled: Callable[[Bed], bool]
    """When the operator has answered to it; then it is left alone for a moment."""


@dataclass(frozen=True)
class Scenario:
    name: str
    acts: Sequence[Act]
    policy: str = "ExitCode"
    clean: str = "Running"


def job(bed: Bed, scenario: Scenario) -> Object:
    """A master and two workers that wait."""
    told = "/told/end-$(hostname)"
    script = (
        f"trap 'exit 143' TERM; while [ ! -e {told} ]; do sleep 0.2; done; "
        f"read code < {told}; rm {told}; exit $code"
    )
    ports = [{"name": "pytorchjob-port", "containerPort": 29500}]
    command = {"image": "ndctl:1", "command": ["sh", "-c", script], "ports": ports}
    places = [{"name": "told", "mountPath": "/told"}]
    own = [{"name": "OWN", "value": "first"}]
    template = {
        "metadata": {"labels": {"mine": "yes"}, "annotations": {"noted": "too"}},
        "spec": {
            "containers": [{"name": "pytorch", **command, "env": own, "volumeMounts": places}],
            "volumes": [{"name": "told", "hostPath": {"path": str(bed.kube.runs)}}],
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


def _kill(pod: str) -> Callable[[Bed], None]:
    def do(bed: Bed) -> None:
        os.kill(bed.kube.pids(pod, NAMESPACE)[0], signal.SIGKILL)

    return do


def _lose(bed: Bed) -> None:
    bed.kube.lose_node(bed.node_of(FIRST))
    bed.delete("pod", FIRST)


def _terminating(bed: Bed) -> bool:
    return "deletionTimestamp" in bed.kube.get("pods", FIRST, NAMESPACE)["metadata"]


def _no_pods(bed: Bed) -> bool:
    return not bed.uids()


def _ended(condition: str, *left: str) -> Callable[[Bed], bool]:
    return lambda bed: bed.holds(condition) and set(bed.uids()) == set(left)


def _again(*pods: str) -> Callable[[Bed], bool]:
    return lambda bed: bed.anew(*pods)


STARTS = "the job is made"


def start(scenario: Scenario) -> Act:
    """The first of each."""
    return Act(
        STARTS,
        lambda bed: bed.kube.apply(job(bed, scenario), namespace=NAMESPACE),
        lambda bed: bed.all_run(),
    )


FORCED = ("--force", "--grace-period=0")
SCENARIOS = (
    Scenario(
        "master-ends-well",
        [
            Act(
                "the master ends with 0",
                lambda bed: bed.ends(MASTER, 0),
                _ended("Succeeded", MASTER),
            ),
        ],
    ),
    Scenario(
        "master-ends-well-and-no-pod-is-cleaned",
        [
            Act(
                "the master ends with 0",
                lambda bed: bed.ends(MASTER, 0),
                _ended("Succeeded", *PODS),
            ),
        ],
        clean="None",
    ),
    Scenario(
        "worker-ends-with-211",
        [
            Act("a worker ends with 211", lambda bed: bed.ends(SECOND, 211), _again(SECOND)),
        ],
    ),
    Scenario(
        "worker-ends-with-3",
        [
            Act(
                "a worker ends with 3",
                lambda bed: bed.ends(SECOND, 3),
                _ended("Failed", SECOND),
            ),
        ],
    ),
    Scenario(
        "processes-are-killed",
        [
            Act("a worker's process is killed", _kill(FIRST), _again(FIRST)),
            Act("the master's process is killed", _kill(MASTER), _again(MASTER)),
        ],
    ),
    Scenario(
        "pods-are-deleted",
        [
            Act("a worker is deleted", lambda bed: bed.delete("pod", FIRST), _again(FIRST)),
            Act("the master is deleted", lambda bed: bed.delete("pod", MASTER), _again(MASTER)),
        ],
    ),
    Scenario(
        "node-is-lost",
        [
            Act("a worker's node is lost, and its pod is deleted", _lose, _terminating),
            Act(
                "that pod is deleted by force",
                lambda bed: bed.delete("pod", FIRST, *FORCED),
                _again(FIRST),
            ),
        ],
    ),
    Scenario(
        "suspended-and-resumed",
        [
            Act(
                "the job is suspended",
                lambda bed: bed.suspend(True),
                lambda bed: bed.holds("Suspended") and _no_pods(bed),
            ),
            Act("the job is resumed", lambda bed: bed.suspend(False), _again(*PODS)),
        ],
    ),
    Scenario(
        "worker-fails-under-on-failure",
        [
            Act("a worker is evicted", lambda bed: bed.kube.evict(SECOND), _again(SECOND)),
        ],
        policy="OnFailure",
    ),
    Scenario(
        "job-is-deleted",
        [
            Act("the job is deleted", lambda bed: bed.delete("pytorchjob", JOB), _no_pods),
        ],
    ),
)

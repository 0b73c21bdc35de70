"""What a recorded scenario is: a job of three pods of one kind, and the actions on it.

Each pod runs a shell script that waits for a file with its exit code. No code of ndctl runs in it.
"""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.standins.api import Object
from tests.kubernetes.testbed import KubeTestbed

NAMESPACE = "default"
JOB = "job"
FORCED = ("--force", "--grace-period=0")


@dataclass(frozen=True)
class JobKind:
    """A kind of job and how its operator shows that the job runs."""

    kind: str
    resource: str
    pods: tuple[str, str, str]
    """Names of its pods as `pod_name` returns them, the leader's first."""
    makes: tuple[tuple[str, str], ...]
    """Resources, each with a label selector, that its operator creates. A job can be created again
    only if all of them are gone."""
    group_label: str
    """Label of a pod with its kind of replica. An operator may create these in any order."""
    suspend: tuple[str, ...]
    """Path of the field that suspends the job."""
    is_running: Callable[[Object], bool]
    status: Callable[[Object], Object]
    """The recorded part of the job's status."""


@dataclass
class JobUnderTest:
    """The job on the testbed, as an action sees it."""

    kube: KubeTestbed
    kind: JobKind
    before: dict[str, str]
    """Pod to its uid when the present action started."""

    def pods(self) -> dict[str, Object]:
        """Name to pod. A pod that has ended counts only while no other one has its name."""
        found = self.kube.objects("pods", NAMESPACE)
        return {pod_name(pod): pod for pod in sorted(found, key=lambda pod: not has_ended(pod))}

    def uids(self) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.pods().items()}

    def has_condition(self, condition: str) -> bool:
        return condition in self.kube.conditions(self.kind.resource, JOB, NAMESPACE)

    def all_run(self) -> bool:
        phases = {name: pod["status"].get("phase") for name, pod in self.pods().items()}
        if phases != dict.fromkeys(self.kind.pods, "Running"):
            return False
        return self.kind.is_running(self.kube.get(self.kind.resource, JOB, NAMESPACE))

    def phase_of(self, pod: str) -> str:
        phase: str = self.pods()[pod]["status"].get("phase", "Pending")
        return phase

    def nothing_runs(self) -> bool:
        """Whether every pod that remains has ended."""
        return all(map(has_ended, self.pods().values()))

    def were_recreated(self, *pods: str) -> bool:
        """Whether exactly these pods were created again, and all pods run."""
        now = self.uids()
        changed = {name for name in self.kind.pods if self.before.get(name) != now.get(name)}
        return changed == set(pods) and self.all_run()

    def end_process(self, pod: str, code: int) -> None:
        """Makes the pod's process exit with `code`."""
        (self.kube.runs / f"end-{pod}").write_text(f"{code}\n")

    def kill_process(self, pod: str) -> None:
        os.kill(self.kube.pids(self.full_name(pod), NAMESPACE)[0], signal.SIGKILL)

    def suspend(self, suspended: bool) -> None:
        value: Any = suspended
        for word in reversed(self.kind.suspend):
            value = {word: value}
        patch = json.dumps({"spec": value})
        words = ("patch", self.kind.resource, JOB, "-n", NAMESPACE, "--type=merge", "-p", patch)
        self.kube.kubectl(*words)

    def delete_job(self) -> None:
        self._delete(self.kind.resource, JOB)

    def delete_pod(self, pod: str, *words: str) -> None:
        self._delete("pod", self.full_name(pod), *words)

    def _delete(self, *words: str) -> None:
        self.kube.kubectl("delete", *words, "-n", NAMESPACE, "--wait=false")

    def evict(self, pod: str) -> None:
        self.kube.evict(self.full_name(pod))

    def full_name(self, pod: str) -> str:
        name: str = self.pods()[pod]["metadata"]["name"]
        return name

    def node_of(self, pod: str) -> str:
        name: str = self.pods()[pod]["spec"]["nodeName"]
        return name


def pod_name(pod: Object) -> str:
    """Name of a pod without the random end that a Job gives it."""
    name: str = pod["spec"].get("hostname") or pod["metadata"]["name"]
    return name


def has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Action:
    description: str
    perform: Callable[[JobUnderTest], object]
    is_settled: Callable[[JobUnderTest], bool]
    """Whether the operator has reacted. The recording then waits until nothing changes."""


@dataclass(frozen=True)
class Scenario:
    name: str
    kind: JobKind
    objects: Callable[[JobUnderTest], Sequence[Object]]
    """The objects that create the job."""
    actions: Sequence[Action]

    @property
    def title(self) -> str:
        """Name of the file with its recording."""
        return f"{self.kind.kind.lower()}-{self.name}"


JOB_IS_CREATED = "the job is made"


def start_job(scenario: Scenario) -> Action:
    """The first action of every scenario."""
    return Action(
        JOB_IS_CREATED,
        lambda tested: tested.kube.apply(*scenario.objects(tested), namespace=NAMESPACE),
        lambda tested: tested.all_run(),
    )


def pod_template(tested: JobUnderTest, container: str, **spec: object) -> Object:
    """A pod that waits for the file with its exit code."""
    code_file = "/exit-codes/end-$(hostname)"
    script = (
        f"trap 'exit 143' TERM; while [ ! -e {code_file} ]; do sleep 0.2; done; "
        f"read code < {code_file}; rm {code_file}; exit $code"
    )
    ports = [{"name": "pytorchjob-port", "containerPort": 29500}]
    command = {"image": "ndctl:1", "command": ["sh", "-c", script], "ports": ports}
    mounts = [{"name": "exit-codes", "mountPath": "/exit-codes"}]
    own = [{"name": "OWN", "value": "first"}]
    return {
        "metadata": {"labels": {"mine": "yes"}, "annotations": {"noted": "too"}},
        "spec": {
            "containers": [{"name": container, **command, "env": own, "volumeMounts": mounts}],
            "volumes": [{"name": "exit-codes", "hostPath": {"path": str(tested.kube.runs)}}],
            "terminationGracePeriodSeconds": 20,
            **spec,
        },
    }


def has_no_pods(tested: JobUnderTest) -> bool:
    return not tested.uids()


def is_terminating(pod: str) -> Callable[[JobUnderTest], bool]:
    return lambda tested: "deletionTimestamp" in tested.pods()[pod]["metadata"]


def has_ended_with(condition: str, *left: str) -> Callable[[JobUnderTest], bool]:
    """Whether the job has this condition, and only the pods `left` remain."""
    return lambda tested: tested.has_condition(condition) and set(tested.uids()) == set(left)


def were_recreated(*pods: str) -> Callable[[JobUnderTest], bool]:
    return lambda tested: tested.were_recreated(*pods)


def lose_node_and_delete_pod(pod: str) -> Callable[[JobUnderTest], None]:
    def perform(tested: JobUnderTest) -> None:
        tested.kube.lose_node(tested.node_of(pod))
        tested.delete_pod(pod)

    return perform


def suspended_and_resumed(*pods: str) -> tuple[Action, Action]:
    return (
        Action(
            "the job is suspended",
            lambda tested: tested.suspend(True),
            lambda tested: tested.has_condition("Suspended") and has_no_pods(tested),
        ),
        Action("the job is resumed", lambda tested: tested.suspend(False), were_recreated(*pods)),
    )


JOB_IS_DELETED = Action("the job is deleted", lambda tested: tested.delete_job(), has_no_pods)

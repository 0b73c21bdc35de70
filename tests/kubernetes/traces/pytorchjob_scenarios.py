"""The recorded scenarios of a PyTorchJob: a master and two workers."""

from collections.abc import Callable

from tests.kubernetes.standins.api import Object
from tests.kubernetes.traces.scenarios import (
    FORCED,
    JOB,
    JOB_IS_DELETED,
    Action,
    JobKind,
    JobUnderTest,
    Scenario,
    has_ended_with,
    is_terminating,
    lose_node_and_delete_pod,
    pod_template,
    suspended_and_resumed,
    were_recreated,
)

REPLICA_TYPE = "training.kubeflow.org/replica-type"
MASTER, WORKER_0, WORKER_1 = (f"{JOB}-{rest}" for rest in ("master-0", "worker-0", "worker-1"))
PODS = (MASTER, WORKER_0, WORKER_1)


def _is_running(job: Object) -> bool:
    conditions = job.get("status", {}).get("conditions", ())
    return any(each["type"] == "Running" and each["status"] == "True" for each in conditions)


def _status(status: Object) -> Object:
    replicas = status.get("replicaStatuses") or {}
    return {
        "replicas": {kind: dict(sorted(each.items())) for kind, each in sorted(replicas.items())},
        "startTime": "startTime" in status,
        "completionTime": "completionTime" in status,
    }


PYTORCHJOB = JobKind(
    kind="PyTorchJob",
    resource="pytorchjobs",
    pods=PODS,
    makes=(("services", REPLICA_TYPE),),
    group_label=REPLICA_TYPE,
    suspend=("runPolicy", "suspend"),
    is_running=_is_running,
    status=_status,
)


def _job(policy: str, clean: str) -> Callable[[JobUnderTest], list[Object]]:
    def create(tested: JobUnderTest) -> list[Object]:
        replica = {"restartPolicy": policy, "template": pod_template(tested, "pytorch")}
        kinds = {"Master": {"replicas": 1, **replica}, "Worker": {"replicas": 2, **replica}}
        job = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": JOB},
            "spec": {
                "nprocPerNode": "2",
                "pytorchReplicaSpecs": kinds,
                "runPolicy": {"cleanPodPolicy": clean},
            },
        }
        return [job]

    return create


def _scenario(
    name: str, *actions: Action, policy: str = "ExitCode", clean: str = "Running"
) -> Scenario:
    return Scenario(name, PYTORCHJOB, _job(policy, clean), actions)


def _master_ends(*left: str) -> Action:
    return Action(
        "the master ends with 0",
        lambda tested: tested.end_process(MASTER, 0),
        has_ended_with("Succeeded", *left),
    )


SCENARIOS = (
    _scenario("master-ends-well", _master_ends(MASTER)),
    _scenario("master-ends-well-and-no-pod-is-cleaned", _master_ends(*PODS), clean="None"),
    _scenario(
        "worker-ends-with-211",
        Action(
            "a worker ends with 211",
            lambda tested: tested.end_process(WORKER_1, 211),
            were_recreated(WORKER_1),
        ),
    ),
    _scenario(
        "worker-ends-with-3",
        Action(
            "a worker ends with 3",
            lambda tested: tested.end_process(WORKER_1, 3),
            has_ended_with("Failed", WORKER_1),
        ),
    ),
    _scenario(
        "processes-are-killed",
        Action(
            "a worker's process is killed",
            lambda tested: tested.kill_process(WORKER_0),
            were_recreated(WORKER_0),
        ),
        Action(
            "the master's process is killed",
            lambda tested: tested.kill_process(MASTER),
            were_recreated(MASTER),
        ),
    ),
    _scenario(
        "pods-are-deleted",
        Action(
            "a worker is deleted",
            lambda tested: tested.delete_pod(WORKER_0),
            were_recreated(WORKER_0),
        ),
        Action(
            "the master is deleted",
            lambda tested: tested.delete_pod(MASTER),
            were_recreated(MASTER),
        ),
    ),
    _scenario(
        "node-is-lost",
        Action(
            "a worker's node is lost, and its pod is deleted",
            lose_node_and_delete_pod(WORKER_0),
            is_terminating(WORKER_0),
        ),
        Action(
            "that pod is deleted by force",
            lambda tested: tested.delete_pod(WORKER_0, *FORCED),
            were_recreated(WORKER_0),
        ),
    ),
    _scenario("suspended-and-resumed", *suspended_and_resumed(*PODS)),
    _scenario(
        "worker-fails-under-on-failure",
        Action(
            "a worker is evicted", lambda tested: tested.evict(WORKER_1), were_recreated(WORKER_1)
        ),
        policy="OnFailure",
    ),
    _scenario("job-is-deleted", JOB_IS_DELETED),
)

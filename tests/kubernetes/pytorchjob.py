"""PyTorchJob v1 as Kubeflow's training operator 1.9 makes pods of it."""

import copy
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.api import Api, Object, path
from tests.kubernetes.nodes import now
from tests.kubernetes.operator import (
    age_s,
    create_pod,
    delete_pods,
    exit_code,
    has_condition,
    headless_service,
    phase,
    set_condition,
    write_status,
)

CONTAINER, PORT_NAME, PORT = "pytorch", "pytorchjob-port", 23456
PREFIX = "training.kubeflow.org/"
NO_EXIT_CODE = 0xBEEF
"""What the operator takes for the exit code of a pod without one, as after an eviction."""


@dataclass(frozen=True)
class PyTorchJobs:
    api: Api
    resource: str = "pytorchjobs"

    async def reconcile(self, job: Object, pods: list[Object]) -> None:
        status = copy.deepcopy(job.get("status") or {})
        conditions = status.setdefault("conditions", [])
        name = job["metadata"]["name"]
        set_condition(conditions, "Created", True, "PyTorchJobCreated", f"{name} is created.")
        status.setdefault("replicaStatuses", {})
        if has_condition(conditions, "Succeeded") or has_condition(conditions, "Failed"):
            await self._clean(job, pods, status)
        elif job["spec"].get("runPolicy", {}).get("suspend"):
            await self._suspend(job, pods, status)
        else:
            await self._run(job, pods, status)
        await write_status(self.api, self.resource, job, status)

    async def _clean(self, job: Object, pods: list[Object], status: Object) -> None:
        policy = job["spec"].get("runPolicy", {})
        clean = policy.get("cleanPodPolicy", "None")
        running = [pod for pod in pods if phase(pod) in ("Running", "Pending")]
        await delete_pods(self.api, {"All": pods, "Running": running, "None": []}[clean])
        ttl, ended = policy.get("ttlSecondsAfterFinished"), status.get("completionTime")
        if ttl is not None and ended and age_s(ended) >= ttl:
            metadata = job["metadata"]
            await self.api.delete(path(self.resource, metadata["namespace"], metadata["name"]))

    async def _suspend(self, job: Object, pods: list[Object], status: Object) -> None:
        name = job["metadata"]["name"]
        await delete_pods(self.api, pods)
        said = f"PyTorchJob {name} is suspended."
        if has_condition(status["conditions"], "Running"):
            set_condition(status["conditions"], "Running", False, "PyTorchJobSuspended", said)
        set_condition(status["conditions"], "Suspended", True, "PyTorchJobSuspended", said)
        status.pop("startTime", None)
        status["replicaStatuses"] = {}

    async def _run(self, job: Object, pods: list[Object], status: Object) -> None:
        name, conditions = job["metadata"]["name"], status["conditions"]
        if has_condition(conditions, "Suspended"):
            said = f"PyTorchJob {name} is resumed."
            set_condition(conditions, "Suspended", False, "PyTorchJobResumed", said)
        status.setdefault("startTime", now())
        if why := _over_the_limit(job, pods, status):
            await delete_pods(self.api, pods)
            return _finish(status, "Failed", "PyTorchJobFailed", why)
        for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
            theirs = [pod for pod in pods if _label(pod, "replica-type") == kind.lower()]
            await self._replicas(job, kind, replica, theirs, conditions)
            counted = {each: [pod for pod in theirs if phase(pod) == each] for each in PHASES}
            status["replicaStatuses"][kind] = {
                word: len(counted[each]) for each, word in PHASES.items() if counted[each]
            }
        return _conclude(job, status)

    async def _replicas(
        self, job: Object, kind: str, replica: Object, pods: list[Object], conditions: list[Object]
    ) -> None:
        wanted, name = replica.get("replicas", 1), job["metadata"]["name"]
        by_index = {int(_label(pod, "replica-index")): pod for pod in pods}
        for index, pod in by_index.items():
            if index >= wanted:
                await delete_pods(self.api, [pod])
            elif phase(pod) == "Failed" and _retried(replica, pod):
                await delete_pods(self.api, [pod])
                _restarting(name, kind, conditions)
        for index in sorted(set(range(wanted)) - set(by_index)):
            await self._create(job, kind, index, replica)

    async def _create(self, job: Object, kind: str, index: int, replica: Object) -> None:
        name = f"{job['metadata']['name']}-{kind.lower()}-{index}"
        labels = {
            PREFIX + "job-name": job["metadata"]["name"],
            PREFIX + "operator-name": "pytorchjob-controller",
            PREFIX + "replica-type": kind.lower(),
            PREFIX + "replica-index": str(index),
        }
        role = {PREFIX + "job-role": "master"} if kind == "Master" else {}
        template = copy.deepcopy(replica["template"])
        policy = replica.get("restartPolicy", "OnFailure")
        template["spec"]["restartPolicy"] = "Never" if policy == "ExitCode" else policy
        for container in template["spec"]["containers"]:
            container.setdefault("env", []).extend(_environment(job, kind, index))
        await create_pod(self.api, job, name, template, labels | role)
        ports = [{"name": PORT_NAME, "port": _port(job)}]
        await headless_service(self.api, job, name, labels, ports)


PHASES = {"Running": "active", "Succeeded": "succeeded", "Failed": "failed"}


def _environment(job: Object, kind: str, index: int) -> list[Object]:
    spec, name = job["spec"], job["metadata"]["name"]
    replicas = spec["pytorchReplicaSpecs"]
    count = sum(each.get("replicas", 1) for each in replicas.values())
    ranks = str(spec.get("nprocPerNode", "auto"))
    values = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": ranks, "PET_NNODES": str(count)}
    if "Master" in replicas:
        rank = 0 if kind == "Master" else index + 1
        address, port = f"{name}-master-0", str(_port(job))
        size = count * (int(ranks) if ranks.isdigit() else 1)
        values |= {"MASTER_ADDR": address, "MASTER_PORT": port, "RANK": str(rank)}
        values |= {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": port}
        values |= {"WORLD_SIZE": str(size), "PET_NODE_RANK": str(rank)}
    if elastic := spec.get("elasticPolicy"):
        host = elastic.get("rdzvHost", f"{name}-worker-0")
        values["PET_RDZV_ENDPOINT"] = f"{host}:{elastic.get('rdzvPort', PORT)}"
        values["PET_RDZV_BACKEND"] = elastic.get("rdzvBackend", "c10d")
        values["PET_RDZV_ID"] = elastic.get("rdzvId", name)
        values["PET_NNODES"] = f"{elastic.get('minReplicas', 1)}:{elastic['maxReplicas']}"
        values["PET_MAX_RESTARTS"] = str(elastic.get("maxRestarts", 3))
        conf = ",".join(f"{it['key']}={it['value']}" for it in elastic.get("rdzvConf", ()))
        values |= {"PET_RDZV_CONF": conf} if conf else {}
    return [{"name": key, "value": value} for key, value in values.items()]


def _port(job: Object) -> int:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    replica = replicas.get("Master") or replicas["Worker"]
    for container in replica["template"]["spec"]["containers"]:
        for port in container.get("ports", ()):
            if container["name"] == CONTAINER and port.get("name") == PORT_NAME:
                return int(port["containerPort"])
    return PORT


def _retried(replica: Object, pod: Object) -> bool:
    if replica.get("restartPolicy", "OnFailure") != "ExitCode":
        return False
    code = exit_code(pod, CONTAINER)
    return (NO_EXIT_CODE if code is None else code) >= 128


def _over_the_limit(job: Object, pods: list[Object], status: Object) -> str:
    policy, name = job["spec"].get("runPolicy", {}), job["metadata"]["name"]
    deadline, limit = policy.get("activeDeadlineSeconds"), policy.get("backoffLimit")
    if deadline is not None and age_s(status["startTime"]) >= deadline:
        return f"PyTorchJob {name} has failed because it was active longer than specified deadline"
    restarts = sum(
        container.get("restartCount", 0)
        for pod in pods
        if pod["spec"].get("restartPolicy") in ("OnFailure", "Always")
        for container in pod.get("status", {}).get("containerStatuses", ())
    )
    if limit is not None and restarts and restarts >= limit:
        return f"PyTorchJob {name} has failed because it has reached the specified backoff limit"
    return ""


def _conclude(job: Object, status: Object) -> None:
    """Conditions from the counts of pods, in the operator's order."""
    name, conditions = job["metadata"]["name"], status["conditions"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    restarting = has_condition(conditions, "Restarting")
    for kind, replica in replicas.items():
        counts: dict[str, Any] = status["replicaStatuses"].get(kind, {})
        done, failed = counts.get("succeeded", 0), counts.get("failed", 0)
        decides = kind == "Master" or "Master" not in replicas
        if decides and counts.get("active"):
            said = f"PyTorchJob {name} is running."
            set_condition(conditions, "Running", True, "PyTorchJobRunning", said)
            conditions[:] = [each for each in conditions if each["type"] != "Restarting"]
        # the trap: without a master, one worker of an elastic job ends it for all
        enough = 1 if "elasticPolicy" in job["spec"] else replica.get("replicas", 1)
        if decides and done >= enough:
            said = f"PyTorchJob {name} is successfully completed."
            return _finish(status, "Succeeded", "PyTorchJobSucceeded", said)
        if failed and restarting:
            _restarting(name, kind, conditions)
        elif failed:
            said = f"PyTorchJob {name} is failed because {failed} {kind} replica(s) failed."
            return _finish(status, "Failed", "PyTorchJobFailed", said)
    return None


def _restarting(name: str, kind: str, conditions: list[Object]) -> None:
    said = f"PyTorchJob {name} is restarting because {kind} replica(s) failed."
    set_condition(conditions, "Restarting", True, "PyTorchJobRestarting", said)
    conditions[:] = [each for each in conditions if each["type"] != "Running"]


def _finish(status: Object, kind: str, reason: str, message: str) -> None:
    if has_condition(status["conditions"], "Running"):
        set_condition(status["conditions"], "Running", False, reason, message)
    set_condition(status["conditions"], kind, True, reason, message)
    status["completionTime"] = now()


def _label(pod: Object, name: str) -> str:
    return str(pod["metadata"].get("labels", {}).get(PREFIX + name, ""))

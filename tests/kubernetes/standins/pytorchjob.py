"""Stand-in for Kubeflow's training operator 1.9: PyTorchJob v1 to pods and services."""

import copy
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.standins.api import Api, Object, path
from tests.kubernetes.standins.nodes import now
from tests.kubernetes.standins.operator import (
    age_s,
    create_pod,
    delete_pods,
    exit_code,
    has_condition,
    headless_service,
    phase,
    write_status,
)
from tests.kubernetes.standins.pod import post_event

CONTAINER, PORT_NAME, PORT = "pytorch", "pytorchjob-port", 23456
PREFIX = "training.kubeflow.org/"
NO_EXIT_CODE = 0xBEEF
"""The operator assumes this code for a pod that has no exit code, for example after an eviction."""


@dataclass(frozen=True)
class PyTorchJobs:
    api: Api
    resource: str = "pytorchjobs"

    async def reconcile(self, job: Object, pods: list[Object]) -> None:
        status = copy.deepcopy(job.get("status") or {})
        conditions = status.setdefault("conditions", [])
        name = job["metadata"]["name"]
        _condition(conditions, "Created", True, "Created", f"PyTorchJob {name} is created.")
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
        await self._delete(job, {"All": pods, "Running": running, "None": []}[clean], services=True)
        if has_condition(status["conditions"], "Succeeded"):
            for counts in status["replicaStatuses"].values():
                _count(counts, "succeeded", counts.pop("active", 0))
        ttl, ended = policy.get("ttlSecondsAfterFinished"), status.get("completionTime")
        if ttl is not None and ended and age_s(ended) >= ttl:
            metadata = job["metadata"]
            await self.api.delete(path(self.resource, metadata["namespace"], metadata["name"]))

    async def _suspend(self, job: Object, pods: list[Object], status: Object) -> None:
        name, conditions = job["metadata"]["name"], status["conditions"]
        await self._delete(job, pods, services=True)
        message = f"PyTorchJob {name} is suspended."
        if has_condition(conditions, "Running"):
            _condition(conditions, "Running", False, "Suspended", message)
        if not has_condition(conditions, "Suspended"):
            _condition(conditions, "Suspended", True, "Suspended", message)
            await self._post_event(job, "Normal", "PyTorchJobSuspended", message)
        for counts in status["replicaStatuses"].values():
            counts.pop("active", None)

    async def _run(self, job: Object, pods: list[Object], status: Object) -> None:
        name, conditions = job["metadata"]["name"], status["conditions"]
        if has_condition(conditions, "Suspended"):
            message = f"PyTorchJob {name} is resumed."
            _condition(conditions, "Suspended", False, "Resumed", message)
            await self._post_event(job, "Normal", "PyTorchJobResumed", message)
            status["startTime"] = now()
        status.setdefault("startTime", now())
        if why := _over_the_limit(job, pods, status):
            await self._delete(job, pods, services=True)
            await self._post_event(job, "Normal", "PyTorchJobFailed", why)
            _finish(status, "Failed", why)
            return
        for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
            theirs = [pod for pod in pods if _label(pod, "replica-type") == kind.lower()]
            await self._replicas(job, kind, replica, theirs, conditions)
            status["replicaStatuses"][kind] = _counts(theirs)
        for level, reason, message in _conclude(job, status):
            await self._post_event(job, level, reason, message)

    async def _replicas(
        self, job: Object, kind: str, replica: Object, pods: list[Object], conditions: list[Object]
    ) -> None:
        wanted, name = replica.get("replicas", 1), job["metadata"]["name"]
        by_index = {int(_label(pod, "replica-index")): pod for pod in pods}
        for index, pod in by_index.items():
            await self._post_exit_code(job, pod)
            if index >= wanted:
                await self._delete(job, [pod])
            elif phase(pod) == "Failed" and _retried(replica, pod):
                await self._delete(job, [pod])
                message = f"job {name} is restarting because {kind} replica(s) failed."
                _condition(conditions, "Restarting", True, "Restarting", message)
                await self._post_event(job, "Warning", "PyTorchJobRestarting", message)
            elif phase(pod) == "Failed" and replica.get("restartPolicy") == "ExitCode":
                # No completionTime: the operator sets it only when the counts end the job.
                message = f'job "{name}" is failing because "{kind}" replica(s) failed.'
                _condition(conditions, "Failed", True, "Failed", message)
                await self._post_event(job, "Warning", "PyTorchJobFailed", message)
        for index in sorted(set(range(wanted)) - set(by_index)):
            await self._create(job, kind, index, replica)

    async def _delete(self, job: Object, pods: list[Object], *, services: bool = False) -> None:
        """Deletes each pod once; with `services`, also the service of the same name."""
        for pod in pods:
            metadata = pod["metadata"]
            if "deletionTimestamp" in metadata:
                continue
            await delete_pods(self.api, [pod])
            message = f"Deleted pod: {metadata['name']}"
            await self._post_event(job, "Normal", "SuccessfulDeletePod", message)
            if services:
                await self.api.delete(path("services", metadata["namespace"], metadata["name"]))
                message = f"Deleted service: {metadata['name']}"
                await self._post_event(job, "Normal", "SuccessfulDeleteService", message)

    async def _post_exit_code(self, job: Object, pod: Object) -> None:
        code = exit_code(pod, CONTAINER)
        if code is not None:
            where = f"{pod['metadata']['namespace']}.{pod['metadata']['name']}"
            message = f"Pod: {where} exited with code {code}"
            await self._post_event(job, "Normal", "ExitedWithCode", message)

    async def _post_event(self, job: Object, level: str, reason: str, message: str) -> None:
        await post_event(self.api, job, level, reason, message)

    async def _create(self, job: Object, kind: str, index: int, replica: Object) -> None:
        name = f"{job['metadata']['name']}-{kind.lower()}-{index}"
        labels = {**_labels(job["metadata"]["name"], kind), PREFIX + "replica-index": str(index)}
        role = {PREFIX + "job-role": "master"} if kind == "Master" else {}
        template = copy.deepcopy(replica["template"])
        policy = replica.get("restartPolicy", "OnFailure")
        template["spec"]["restartPolicy"] = "Never" if policy == "ExitCode" else policy
        for container in template["spec"]["containers"]:
            container.setdefault("env", []).extend(_environment(job, kind, index))
        await create_pod(self.api, job, name, template, labels | role)
        ports = [{"name": PORT_NAME, "port": _port(job)}]
        if await headless_service(
            self.api, job, name, labels, ports, labels=labels, not_ready=False
        ):
            message = f"Created service: {name}"
            await self._post_event(job, "Normal", "SuccessfulCreateService", message)


def _counts(pods: list[Object]) -> dict[str, int]:
    """Counts pods by phase. A running pod that is being deleted counts as failed, because a lost
    node may never confirm its end."""
    counts: dict[str, int] = {}
    for pod in pods:
        word = PHASES.get(phase(pod))
        if word == "active" and "deletionTimestamp" in pod["metadata"]:
            word = "failed"
        if word is not None:
            _count(counts, word, 1)
    return counts


def _count(counts: dict[str, int], word: str, more: int) -> None:
    if more:
        counts[word] = counts.get(word, 0) + more


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
    policy = replica.get("restartPolicy", "OnFailure")
    if policy != "ExitCode":
        return bool(policy != "Never")
    code = exit_code(pod, CONTAINER)
    return (NO_EXIT_CODE if code is None else code) >= 128


def _over_the_limit(job: Object, pods: list[Object], status: Object) -> str:
    policy, name = job["spec"].get("runPolicy", {}), job["metadata"]["name"]
    deadline, limit = policy.get("activeDeadlineSeconds"), policy.get("backoffLimit")
    if deadline is not None and age_s(status["startTime"]) >= deadline:
        return f"Job {name} has failed because it was active longer than specified deadline"
    restarts = sum(
        container.get("restartCount", 0)
        for pod in pods
        if phase(pod) == "Running"
        for container in pod.get("status", {}).get("containerStatuses", ())
    )
    if limit is not None and restarts and restarts >= limit:
        return f"Job {name} has failed because it has reached the specified backoff limit"
    return ""


def _conclude(job: Object, status: Object) -> list[tuple[str, str, str]]:
    """Sets conditions from the counts of pods. Returns level, reason and message of new events."""
    name, conditions = job["metadata"]["name"], status["conditions"]
    replicas: Object = job["spec"]["pytorchReplicaSpecs"]
    events: list[tuple[str, str, str]] = []
    for kind, replica in replicas.items():
        counts: dict[str, Any] = status["replicaStatuses"].setdefault(kind, {})
        counts["selector"] = ",".join(
            f"{key}={value}" for key, value in sorted(_labels(name, kind).items())
        )
        active, done, failed = (counts.get(it, 0) for it in ("active", "succeeded", "failed"))
        wanted = replica.get("replicas", 1)
        if kind == "Master" or "Master" not in replicas:
            if active:
                message = f"PyTorchJob {name} is running."
                _condition(conditions, "Running", True, "Running", message)
            # Without a master, the first worker of an elastic job that succeeds ends the job.
            if done >= (1 if "elasticPolicy" in job["spec"] else wanted):
                message = f"PyTorchJob {name} is successfully completed."
                _finish(status, "Succeeded", message)
                return [*events, ("Normal", "PyTorchJobSucceeded", message)]
        if failed and wanted > done + active:
            if replica.get("restartPolicy", "OnFailure") == "Never":
                message = f"PyTorchJob {name} is failed because {failed} {kind} replica(s) failed."
                _finish(status, "Failed", message)
                events.append(("Normal", "PyTorchJobFailed", message))
            else:
                message = (
                    f"PyTorchJob {name} is restarting because {failed} {kind} replica(s) failed."
                )
                _condition(conditions, "Restarting", True, "Restarting", message)
                events.append(("Warning", "PyTorchJobRestarting", message))
    return events


def _finish(status: Object, kind: str, message: str) -> None:
    if not has_condition(status["conditions"], "Failed"):
        status["completionTime"] = now()
    _condition(status["conditions"], kind, True, kind, message)


def _condition(conditions: list[Object], kind: str, holds: bool, reason: str, message: str) -> None:
    """Sets a condition as the operator does.

    Nothing changes once the job has failed. Running and Restarting replace each other. The end of
    the job sets Running to false and keeps its reason.
    """
    fields = {"status": str(holds), "reason": f"PyTorchJob{reason}"}
    now_held = next((each for each in conditions if each["type"] == kind), None)
    if has_condition(conditions, "Failed") or (now_held and fields.items() <= now_held.items()):
        return
    out = {kind, REPLACES.get(kind, kind)}
    conditions[:] = [each for each in conditions if each["type"] not in out]
    if kind in ("Failed", "Succeeded"):
        for each in conditions:
            each["status"] = "False" if each["type"] == "Running" else each["status"]
    stamps = dict.fromkeys(("lastUpdateTime", "lastTransitionTime"), now())
    conditions.append({"type": kind, **stamps, **fields, "message": message})


REPLACES = {"Running": "Restarting", "Restarting": "Running"}


def _labels(job: str, kind: str) -> dict[str, str]:
    """Labels of every pod of a kind of replica."""
    return {
        PREFIX + "job-name": job,
        PREFIX + "operator-name": "pytorchjob-controller",
        PREFIX + "replica-type": kind.lower(),
    }


def _label(pod: Object, name: str) -> str:
    return str(pod["metadata"].get("labels", {}).get(PREFIX + name, ""))

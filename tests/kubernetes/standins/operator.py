"""Reconcile loop of the stand-ins for Kubeflow's training operator, JobSet and Kubeflow Trainer.

These parts of the real controllers are missing: the init container that waits for the master's
name, webhooks, gang schedulers and HPA.
"""

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from tests.kubernetes.standins.api import (
    Api,
    ApiError,
    Informer,
    Key,
    Object,
    key_of,
    owned_by,
    path,
)
from tests.kubernetes.standins.nodes import now
from tests.kubernetes.standins.pod import post_event


class Controller(Protocol):
    @property
    def resource(self) -> str: ...

    async def reconcile(self, job: Object, pods: list[Object]) -> None:
        """`pods` are the pods that the job owns."""


@dataclass
class Operator:
    api: Api
    controllers: Mapping[str, Controller]
    """Kind of job to its controller."""
    queue: "asyncio.Queue[tuple[str, Key]]" = field(default_factory=asyncio.Queue)
    queued: set[tuple[str, Key]] = field(default_factory=set)
    owned: dict[str, dict[Key, Object]] = field(default_factory=dict)
    """Uid of an owner to its pods."""
    jobs: dict[str, Informer] = field(default_factory=dict)

    async def run(self) -> None:
        pods = Informer(self.api, "pods", self._pod_changed)
        for kind, controller in self.controllers.items():
            self.jobs[kind] = Informer(self.api, controller.resource, self._job_changed)
        others = [] if "JobSet" in self.jobs else [Informer(self.api, "jobsets", self._job_changed)]
        async with asyncio.TaskGroup() as tasks:
            for informer in (pods, *self.jobs.values(), *others):
                tasks.create_task(informer.run())
            tasks.create_task(self._work())

    def _job_changed(self, change: str, job: Object) -> None:
        self._enqueue(job["kind"], key_of(job))
        for ref in job["metadata"].get("ownerReferences", ()):
            if ref["kind"] in self.controllers:  # The JobSet belongs to a TrainJob.
                self._enqueue(ref["kind"], (job["metadata"]["namespace"], ref["name"]))

    def _pod_changed(self, change: str, pod: Object) -> None:
        for ref in pod["metadata"].get("ownerReferences", ()):
            if ref["kind"] not in self.controllers or not ref.get("controller"):
                # Not the controller of the pod. The reference only deletes the pod with its job.
                continue
            pods = self.owned.setdefault(ref["uid"], {})
            if change == "DELETED":
                pods.pop(key_of(pod), None)
            else:
                pods[key_of(pod)] = pod
            self._enqueue(ref["kind"], (pod["metadata"]["namespace"], ref["name"]))

    def _enqueue(self, kind: str, key: Key) -> None:
        if kind in self.controllers and (kind, key) not in self.queued:
            self.queued.add((kind, key))
            self.queue.put_nowait((kind, key))

    async def _work(self) -> None:
        while True:
            kind, key = await self.queue.get()
            self.queued.discard((kind, key))
            job = self.jobs[kind].objects.get(key)
            if job is None or "deletionTimestamp" in job["metadata"]:
                continue
            pods = list(self.owned.get(job["metadata"]["uid"], {}).values())
            try:
                await self.controllers[kind].reconcile(job, pods)
            except ApiError as exc:
                await post_event(self.api, job, "Warning", "FailedReconcile", str(exc))
                asyncio.get_running_loop().call_later(1, self._enqueue, kind, key)


async def create_pod(
    api: Api,
    owner: Object,
    name: str,
    template: Object,
    labels: Mapping[str, str],
    *,
    maker: Object | None = None,
) -> Object | None:
    """Creates a pod of `owner`. Events are about `maker`, or else about `owner`."""
    pod = copy.deepcopy(template)
    metadata = pod.setdefault("metadata", {})
    metadata |= {"name": name, "namespace": owner["metadata"]["namespace"]}
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    metadata["ownerReferences"] = owned_by(owner)
    try:
        created = await api.create(path("pods", metadata["namespace"]), {"kind": "Pod", **pod})
    except ApiError as exc:
        await _post_creation(api, owner, maker, "Warning", f"Error creating: {exc}")
        raise
    if created is not None:
        await _post_creation(api, owner, maker, "Normal", f"Created pod: {name}")
    return created


async def _post_creation(
    api: Api, owner: Object, maker: Object | None, kind: str, message: str
) -> None:
    # The Job controller has other reasons than the training operator.
    reason = ("FailedCreate" if kind == "Warning" else "SuccessfulCreate") + (
        "Pod" if maker is None else ""
    )
    await post_event(api, maker or owner, kind, reason, message)


async def delete_pods(api: Api, pods: list[Object]) -> None:
    for pod in pods:
        metadata = pod["metadata"]
        if "deletionTimestamp" not in metadata:
            where = path("pods", metadata["namespace"], metadata["name"])
            await api.delete(where, metadata["uid"])


async def headless_service(
    api: Api,
    owner: Object,
    name: str,
    selector: Mapping[str, str],
    ports: list[Object],
    *,
    labels: Mapping[str, str],
    not_ready: bool = True,
) -> Object | None:
    """None if the service already exists. With `not_ready`, DNS also lists unready pods."""
    metadata = {"name": name, "labels": dict(labels), "ownerReferences": owned_by(owner)}
    spec: Object = {"clusterIP": "None", "selector": dict(selector)}
    spec |= {"publishNotReadyAddresses": True} if not_ready else {}
    body = {"metadata": metadata, "spec": {**spec, **({"ports": ports} if ports else {})}}
    return await api.create(path("services", owner["metadata"]["namespace"]), body)


async def write_status(api: Api, resource: str, job: Object, status: Object) -> None:
    """Sends a merge patch, in which a removed key has the value null."""
    before = job.get("status") or {}
    if status != before:
        metadata = job["metadata"]
        where = path(resource, metadata["namespace"], metadata["name"], "status")
        body = {"metadata": {"uid": metadata["uid"]}, "status": _patch(before, status)}
        await api.patch(where, body)


def _patch(before: Object, after: Object) -> Object:
    patch: Object = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        patch[key] = _patch(old, value) if both and old is not None else value
    return patch


def age_s(stamp: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()


def exit_code(pod: Object, container: str) -> int | None:
    for status in pod.get("status", {}).get("containerStatuses", ()):
        if status["name"] == container and "terminated" in status["state"]:
            return int(status["state"]["terminated"]["exitCode"])
    return None


def phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def has_condition(conditions: list[Object], kind: str) -> bool:
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def set_condition(
    conditions: list[Object], kind: str, holds: bool, reason: str, message: str
) -> None:
    """Appends the condition, unless it already holds with this status and reason."""
    fields = {"status": str(holds), "reason": reason, "message": message}
    for each in conditions:
        if each["type"] == kind and each["status"] == str(holds) and each["reason"] == reason:
            return
    conditions[:] = [each for each in conditions if each["type"] != kind]
    conditions.append({"type": kind, "lastTransitionTime": now(), **fields})

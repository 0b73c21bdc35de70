"""Finds a Kueue queue or a gang scheduler. With one of them, a job never holds a part of its nodes
while it waits for the rest."""

from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Missing
from orchestrator.backends.kubernetes.api.client import ApiReader
from orchestrator.backends.kubernetes.checks.references import Reference, object_there
from orchestrator.backends.kubernetes.inventory import KUEUE, kueue_levels
from orchestrator.backends.kubernetes.render.checks import GANG_SCHEDULERS
from orchestrator.backends.kubernetes.resources import Resource, name_of
from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.errors import BackendError, Unanswered

AT = "cluster.kubernetes"
POD_GROUPS: Mapping[Literal["volcano", "coscheduling"], str] = {
    "volcano": "scheduling.volcano.sh",
    "coscheduling": "scheduling.x-k8s.io",
}
"""The API group of each scheduler's PodGroups."""


class Gang(Struct, frozen=True):
    """The value for `gang_scheduler: auto` in a cluster."""

    spec: KubernetesSpec
    """The spec with the queue or scheduler filled in."""
    note: str = ""
    kueue: tuple[str, ...] | None = None
    """Node labels that are levels of Kueue's Topology; None if they were not read."""


def gang_for(api: ApiReader, namespace: str, spec: KubernetesSpec, hosts: int) -> Gang:
    """Unchanged if the spec names a queue or scheduler, or if the job has a single pod.

    Raises:
        Unanswered: the API server is unreachable, so it is unknown whether there is one.
    """
    if spec.gang_scheduler != "auto" or spec.queue is not None or hosts == 1:
        return Gang(spec)
    queues = _queues(api, namespace)
    if len(queues) == 1:
        (queue,) = queues
        note = f"the job goes into {queue}, the queue of Kueue in namespace {namespace}:"
        note += f" {AT}.queue: {queue} states it in the spec; gang_scheduler: null opts out"
        return Gang(replace(spec, queue=queue), note, kueue_levels(api))
    for name in GANG_SCHEDULERS[spec.kind]:
        if _serves(api, POD_GROUPS[name]):
            note = f"{name} is installed and binds all pods of the job at once:"
            note += f" {AT}.gang_scheduler: {name} states it in the spec; null opts out"
            return Gang(replace(spec, gang_scheduler=name), note)
    return Gang(spec)


def _queues(api: ApiReader, namespace: str) -> list[str]:
    """The namespace's queues; empty without Kueue or without the right to list them."""
    try:
        return [name_of(one) for one in api.list(_local_queues(api), namespace).items]
    except Unanswered:
        raise
    except BackendError:
        return []


def _local_queues(api: ApiReader) -> Resource:
    """Raises Missing without Kueue."""
    version = str(api.read(f"/apis/{KUEUE}")["preferredVersion"]["version"])
    return Resource(KUEUE, version, "localqueues", "LocalQueue")


def _serves(api: ApiReader, group: str) -> bool:
    try:
        return bool(api.read(f"/apis/{group}"))
    except Unanswered:
        raise
    except BackendError:
        return False


def gang_there(spec: KubernetesSpec, hosts: int) -> Iterator[Finding]:
    if hosts == 1 or spec.queue is not None or spec.gang_scheduler != "auto":
        return
    yield Finding(
        what="gang scheduling",
        verdict="warns",
        found="no gang scheduler found: two jobs that need more nodes than exist may each hold some"
        " and wait forever for the rest",
        fix=f"install Kueue (manifests/overlays/kueue) or volcano; set {AT}.queue if"
        f" there are several queues; or {AT}.gang_scheduler: null, if jobs never compete",
    )


def queue_there(api: ApiReader, namespace: str, spec: KubernetesSpec) -> Iterator[Finding]:
    """Whether the spec's queue exists, and which topology levels it offers."""
    queue, what = spec.queue, "queue"
    try:
        resource = _local_queues(api)
    except Missing:
        if queue is not None:
            found = f"{AT}.queue={queue}, but Kueue is not installed"
            fix = f"set {AT}.queue to null, or install Kueue"
            yield Finding(what=what, verdict="stops", found=found, fix=fix)
        return
    except BackendError as exc:
        yield Finding(what=what, verdict="note", found=f"unknown: {exc.message}")
        return
    if queue is None:
        found = f"Kueue {resource.version} is installed; no {AT}.queue is set"
        yield Finding(what=what, verdict="note", found=found)
        return
    fix = f"`kubectl -n {namespace} get localqueues` lists existing ones"
    yield object_there(api, Reference(resource, queue), namespace, what="queue", fix=fix)
    levels = kueue_levels(api)
    said = ", ".join(levels) if levels else "none" if levels is not None else "no right to read it"
    hint = ""
    if levels and spec.topology is None:
        hint = f"; {AT}.topology: {{preferred: {levels[-1]}}} prefers pods close to each other"
    yield Finding(what="kueue topology", verdict="note", found=f"levels: {said}{hint}")

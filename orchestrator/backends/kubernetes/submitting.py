"""From a rendered job to objects in the cluster, once, whoever asks how often."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.backends.kubernetes import fields
from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.fields import LABEL
from orchestrator.backends.kubernetes.refusals import Conflict, Missing
from orchestrator.backends.kubernetes.render import names, objects, token_secret
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CONFIG_MAPS,
    JOB_KINDS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    RUNTIMES,
    SECRETS,
    JobKind,
    Object,
    Resource,
    name_of,
)
from orchestrator.backends.kubernetes.watching import Watching
from orchestrator.contract.handover import Handover
from orchestrator.contract.kubernetes import KubernetesSpec
from orchestrator.errors import BackendError
from orchestrator.job_secret import draw
from orchestrator.seams import Clock

GONE_S = 60.0
"""For what is left of a job that has ended to be taken away."""


@dataclass(frozen=True, slots=True)
class Helper:
    """An object beside the job, which it owns."""

    resource: Resource
    name: str


def helpers_of(spec: KubernetesSpec, job: str) -> list[Helper]:
    return [Helper(SECRETS, names.secret_of(job)), *rendered_beside(spec, job)]


def rendered_beside(spec: KubernetesSpec, job: str) -> list[Helper]:
    """Those that are in the rendered text."""
    found = [Helper(CONFIG_MAPS, names.config_map_of(job))]
    if spec.service_account is None:
        account = names.account_of(job)
        found += [Helper(one, account) for one in (ACCOUNTS, ROLES, ROLE_BINDINGS)]
    if spec.kind == "trainjob":
        found.append(Helper(RUNTIMES, job))
    return found


def submit(api: Api, clock: Clock, namespace: str, handover: Handover) -> None:
    """Apply everything, the job last; then it owns the rest."""
    launch = handover.launch
    spec = launch.kubernetes or KubernetesSpec()
    kind = JOB_KINDS[spec.kind]
    former = api.get(kind.resource, namespace, launch.job)
    if former is not None and fields.launch_of(former) != launch.launch:
        take_away(api, clock, namespace, spec, former)
    made = objects(handover, namespace)
    with contextlib.suppress(Conflict):  # an earlier call has made it, and pods may have read it
        api.create(token_secret(launch, draw()), namespace)
    for item in made[:-1]:
        api.apply(item, namespace)
    job = api.apply(made[-1], namespace)
    own(api, namespace, kind, job, helpers_of(spec, launch.job))


def own(api: Api, namespace: str, kind: JobKind, job: Object, helpers: Sequence[Helper]) -> None:
    """One delete of the job takes all with it."""
    change = {"metadata": {"ownerReferences": [owner_reference(kind, job)]}}
    for helper in helpers:
        with contextlib.suppress(Missing):
            api.merge(helper.resource, namespace, helper.name, change)


def owner_reference(kind: JobKind, job: Object) -> dict[str, Any]:
    return {
        "apiVersion": f"{kind.resource.group}/{kind.resource.version}",
        "kind": kind.resource.kind,
        "name": name_of(job),
        "uid": job["metadata"]["uid"],
    }


def take_away(api: Api, clock: Clock, namespace: str, spec: KubernetesSpec, job: Object) -> None:
    """An object of a launch that is over makes room for the next; returns when it and its pods
    are gone, for the garbage collector takes what still belongs to it."""
    name, kind = name_of(job), JOB_KINDS[spec.kind]
    api.delete(kind.resource, namespace, name, uid=job["metadata"]["uid"])
    for helper in helpers_of(spec, name):
        api.delete(helper.resource, namespace, helper.name)
    api.delete_all(PODS, namespace, labels=f"{LABEL}={name}")
    deadline = clock.monotonic() + GONE_S
    for resource in (kind.resource, PODS):
        watching = Watching(
            api=api,
            clock=clock,
            resource=resource,
            namespace=namespace,
            labels=f"{LABEL}={name}",
        )
        for cache in watching.changes(deadline):
            if not cache.items:
                break
        else:
            raise BackendError(
                f"{resource.kind} of the former launch of {name} does not go away",
                fix=f"`kubectl -n {namespace} get {resource.word} -l {LABEL}={name} -o yaml` shows"
                " what holds it (finalizers, a node that does not answer)",
            )

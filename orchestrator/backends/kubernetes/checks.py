"""What stands in the way of a launch, all at once, before anything is made."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.render import objects
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CLAIMS,
    CONFIG_MAPS,
    JOB_KINDS,
    NAMESPACES,
    PRIORITIES,
    QUOTAS,
    SECRETS,
    Object,
    Resource,
    lookup,
    name_of,
)
from orchestrator.backends.kubernetes.standards import level_of, privileges, to_allow
from orchestrator.cluster.kubernetes.quantities import quantity
from orchestrator.contract.codec import Problem
from orchestrator.contract.handover import Handover
from orchestrator.contract.kubernetes import EnvFrom, KubernetesSpec, MountedVolume, ValueFrom
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import BackendError, Unanswered

AT = "cluster.kubernetes"
BASE = "ndctl"
"""The namespace of manifests/base."""


def check(api: Api, namespace: str, handover: Handover) -> str:
    """A server-side dry run of every object, and a look at what they name.

    Raises BackendError with everything that stands in the way.
    """
    made = objects(handover, namespace)
    launch = handover.launch
    spec = launch.kubernetes or KubernetesSpec()
    said: list[str] = [str(one) for one in _of_other_kinds(api, namespace, launch)]
    for item in made:
        try:
            api.apply(item, namespace, dry_run=True)
        except Unanswered:
            raise
        except BackendError as exc:
            if str(exc) not in said:
                said.append(str(exc))
    found = [
        *_missing(api, namespace, spec),
        *_refused(api, namespace, spec),
        *_quotas(api, namespace, launch),
    ]
    said += [str(one) for one in found]
    if said:
        raise BackendError(
            f"Kubernetes could not run this job as it is (namespace {namespace}, {api.server}):\n  "
            + "\n".join(said).replace("\n", "\n  ")
        )
    kind = JOB_KINDS[spec.kind].resource.kind
    return f"dry run: {api.server} takes the {len(made)} objects of {kind} {namespace}/{launch.job}"


def _of_other_kinds(api: Api, namespace: str, launch: LaunchPlan) -> Iterator[Problem]:
    """Jobs of one name have one run directory, and one ConfigMap that tells pods what to do."""
    mine = (launch.kubernetes or KubernetesSpec()).kind
    for kind in (JOB_KINDS[name].resource for name in JOB_KINDS if name != mine):
        if _is_there(api, kind, namespace, launch.job):
            yield Problem(
                path="name",
                value=launch.job,
                limit=f"one that no {kind.kind} of namespace {namespace} has",
                fix=f"`kubectl -n {namespace} delete {kind.word} {launch.job}` makes room for a"
                f" {JOB_KINDS[mine].resource.kind}; or take another name",
            )


def _is_there(api: Api, resource: Resource, namespace: str, name: str) -> bool:
    """Not of a kind that the cluster does not have, nor of one that may not be looked at."""
    try:
        return api.get(resource, namespace, name) is not None
    except Unanswered:
        raise
    except BackendError:
        return False


def _missing(api: Api, namespace: str, spec: KubernetesSpec) -> Iterator[Problem]:
    """What pods would wait for. Who may not look is not told."""
    claims = [(f"{AT}.runs.claim", spec.runs.claim)]
    claims += [(f"{AT}.volumes", volume.claim) for volume in spec.volumes]
    for path, claim in claims:
        if claim and _is_absent(api, CLAIMS, namespace, claim):
            yield Problem(
                path=path,
                value=claim,
                limit=f"a PersistentVolumeClaim of namespace {namespace}",
                fix=f"name one that `kubectl -n {namespace} get pvc` shows, or make it",
            )
    if spec.service_account and _is_absent(api, ACCOUNTS, namespace, spec.service_account):
        yield Problem(
            path=f"{AT}.service_account",
            value=spec.service_account,
            limit=f"a ServiceAccount of namespace {namespace}",
            fix="leave it out: then the job gets one of its own, with the rights that it needs",
        )
    yield from _references(api, namespace, spec)
    if spec.priority_class and _is_absent(api, PRIORITIES, None, spec.priority_class):
        yield Problem(
            path=f"{AT}.priority_class",
            value=spec.priority_class,
            limit="a PriorityClass of the cluster",
            fix="name one that `kubectl get priorityclass` shows",
        )


def references(spec: KubernetesSpec) -> Iterator[tuple[str, Resource, str, str | None]]:
    """The Secrets and ConfigMaps that a pod does not start without: the key of the spec that names
    one, which it is, and the key that it has to have."""
    for name, value in spec.env.items():
        if isinstance(value, ValueFrom):
            yield f"{AT}.env.{name}", *_source(value), value.key
    for at, one in enumerate(spec.env_from):
        yield f"{AT}.env_from[{at}]", *_source(one), None
    for at, volume in enumerate(spec.volumes):
        if volume.secret is not None or volume.config_map is not None:
            yield f"{AT}.volumes[{at}]", *_source(volume), None


def _source(one: ValueFrom | EnvFrom | MountedVolume) -> tuple[Resource, str]:
    return (SECRETS, one.secret) if one.secret is not None else (CONFIG_MAPS, str(one.config_map))


def _references(api: Api, namespace: str, spec: KubernetesSpec) -> Iterator[Problem]:
    for path, resource, name, key in references(spec):
        lack = lacking(api, namespace, resource, name, key)
        if lack is not None:
            limit = f"of a {resource.kind} of namespace {namespace} that has what is named here"
            fix = f"{lack}: {to_create(namespace, resource, name, key)}"
            yield Problem(path=path, value=name, limit=limit, fix=fix)


class Gets(Protocol):
    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None: ...


def lacking(
    api: Gets, namespace: str, resource: Resource, name: str, key: str | None
) -> str | None:
    """What of a Secret or ConfigMap is not there; None where all is, or may not be asked."""
    try:
        item = api.get(resource, namespace, name)
    except Unanswered:
        raise
    except BackendError:
        return None
    if item is None:
        return f"there is no {resource.kind} {name}"
    keys = {*lookup(item, ("data",), {}), *lookup(item, ("binaryData",), {})}
    if key is not None and key not in keys:
        return f"{resource.kind} {name} has no key {key}, only {', '.join(sorted(keys)) or 'none'}"
    return None


def to_create(namespace: str, resource: Resource, name: str, key: str | None) -> str:
    word = "secret generic" if resource == SECRETS else "configmap"
    of = f" --from-file={key}=FILE" if key is not None else " --from-env-file=FILE"
    return f"`kubectl -n {namespace} create {word} {name}{of}`"


def base_for(namespace: str) -> str:
    """What is typed to have manifests/base in another namespace than its own."""
    if namespace == BASE:
        return "kubectl apply -k manifests/base"
    change = rf"s/\(namespace[:-] *\|serviceaccounts:\){BASE}$/\1{namespace}/"
    return f"kubectl kustomize manifests/base | sed '{change}' | kubectl apply -f -"


def _is_absent(api: Api, resource: Resource, namespace: str | None, name: str) -> bool:
    with contextlib.suppress(BackendError):
        return api.get(resource, namespace, name) is None
    return False


def _refused(api: Api, namespace: str, spec: KubernetesSpec) -> Iterator[Problem]:
    """What pods would not be made for: the dry run of a job makes none."""
    try:
        there = api.get(NAMESPACES, None, namespace)
    except BackendError:
        return
    level = level_of(there or {})
    if level == "privileged":
        return
    allow = to_allow("privileged", namespace)
    for key in privileges(spec):
        yield Problem(
            path=f"{AT}.{key}",
            limit=f"unset: pods of namespace {namespace} have to keep to the standard {level}",
            fix=f"leave it out, or have an administrator type `{allow}`",
        )


def _quotas(api: Api, namespace: str, launch: LaunchPlan) -> Iterator[Problem]:
    """What can never fit; what does not fit now waits, and says so."""
    try:
        quotas = api.list(QUOTAS, namespace).items
    except BackendError:
        return
    wanted = _wanted(launch)
    for quota in quotas:
        hard: Object = lookup(quota, ("spec", "hard"), {})
        for resource, (key, amount) in wanted.items():
            if resource in hard and quantity(amount) * len(launch.hosts) > quantity(hard[resource]):
                total = f"{len(launch.hosts)} pods with {amount} each"
                yield Problem(
                    path=key,
                    value=amount,
                    limit=f"such that {total} fit into {hard[resource]}, the quota"
                    f" {name_of(quota)}'s {resource}",
                    fix="ask for less or for fewer hosts, or for more quota",
                )


def _wanted(launch: LaunchPlan) -> dict[str, tuple[str, str]]:
    """Key of a quota -> the key of the spec and how much of it a pod takes."""
    spec = launch.kubernetes or KubernetesSpec()
    found = {"pods": ("cluster.hosts", "1"), "count/pods": ("cluster.hosts", "1")}
    if spec.gpu_resource:
        gpus = ("cluster.gpus_per_host", str(launch.devices_per_host))
        found[f"requests.{spec.gpu_resource}"] = gpus
    if spec.cpu:
        found |= dict.fromkeys(("cpu", "requests.cpu"), (f"{AT}.cpu", spec.cpu))
    if spec.memory:
        keys = ("memory", "requests.memory", "limits.memory")
        found |= dict.fromkeys(keys, (f"{AT}.memory", spec.memory))
    return found

"""Checks the objects that the pods of a job reference and need to start: Secrets, ConfigMaps,
claims, an account, a priority class. Pure except for the reads of these objects."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from msgspec import Struct

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import ApiReader
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.pods import CONTAINER_LISTS, pod_template
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CLAIMS,
    CONFIG_MAPS,
    PRIORITIES,
    RUNTIME_CLASSES,
    SECRETS,
    Object,
    Resource,
    lookup,
)
from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.kubernetes_spec import (
    EnvFrom,
    KubernetesSpec,
    MountedVolume,
    ValueFrom,
)
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, Unanswered

AT = "cluster.kubernetes"
PULLS = re.compile(r"image_pull_secrets|imagePullSecrets")
"""Part of the path of a Secret for image pulls."""


class Reference(Struct, frozen=True):
    resource: Resource
    name: str
    key: str | None = None
    """Required key of a Secret or ConfigMap."""


def missing(
    api: ApiReader, namespace: str, handover: Handover, *, of_pods: bool = True
) -> Iterator[Finding]:
    """Findings about missing objects. Objects that the user may not read are skipped.

    `of_pods`: also check references in the pod template, which needs a spec without mistakes.
    """
    for reference, path in references(handover, of_pods=of_pods).items():
        place = namespace if reference.resource.namespaced else None
        if (lack := _lack(api, place, reference)) is not None:
            fix = _to_create(namespace, reference, path)
            yield Finding(what=path, verdict="stops", found=lack, fix=fix)


def references(handover: Handover, *, of_pods: bool = True) -> dict[Reference, str]:
    """Each reference with the key of the spec that names it."""
    launch = handover.launch
    spec = launch.kubernetes_spec
    own = {
        Reference(CONFIG_MAPS, names.config_map_of(launch.job)),
        Reference(ACCOUNTS, names.account_of(launch.job)),
    }
    found = dict(_of_keys(spec))
    template = f"{AT}.pod_template.spec"
    pod = pod_template(handover)["spec"] if of_pods else {}
    for reference, place in _of_pod(pod):
        # A reference from a key is also in the template. Report the key, because the user wrote it.
        if reference not in own:
            found.setdefault(reference, f"{template}.{place}")
    return found


def _of_keys(spec: KubernetesSpec) -> Iterator[tuple[Reference, str]]:
    for name, value in spec.env.items():
        if isinstance(value, ValueFrom):
            yield Reference(*_source(value), value.key), f"{AT}.env.{name}"
    for at, one in enumerate(spec.env_from):
        yield Reference(*_source(one)), f"{AT}.env_from[{at}]"
    for at, volume in enumerate(spec.volumes):
        if volume.secret is not None or volume.config_map is not None:
            yield Reference(*_source(volume)), f"{AT}.volumes[{at}]"
    single = (
        (CLAIMS, spec.runs.claim, "runs.claim"),
        *((CLAIMS, one.claim, f"volumes[{at}].claim") for at, one in enumerate(spec.volumes)),
        *(
            (SECRETS, name, f"image_pull_secrets[{at}]")
            for at, name in enumerate(spec.image_pull_secrets)
        ),
        (ACCOUNTS, spec.service_account, "service_account"),
        (PRIORITIES, spec.priority_class, "priority_class"),
    )
    for resource, named, key in single:
        if named is not None:
            yield Reference(resource, named), f"{AT}.{key}"


def _source(one: ValueFrom | EnvFrom | MountedVolume) -> tuple[Resource, str]:
    return (SECRETS, one.secret) if one.secret is not None else (CONFIG_MAPS, str(one.config_map))


OF_A_POD: Mapping[str, Resource] = {
    "serviceAccountName": ACCOUNTS,
    "priorityClassName": PRIORITIES,
    "runtimeClassName": RUNTIME_CLASSES,
}


def _of_pod(pod: Mapping[str, Any]) -> Iterator[tuple[Reference, str]]:
    """Each reference in a pod template, with its place."""
    for field, resource in OF_A_POD.items():
        if pod.get(field):
            yield Reference(resource, pod[field]), field
    for one in pod.get("imagePullSecrets", ()):
        if one.get("name"):
            yield Reference(SECRETS, one["name"]), f"imagePullSecrets[{one['name']}]"
    for key in CONTAINER_LISTS:
        for one in pod.get(key, ()):
            for reference, place in _of_container(one):
                yield reference, f"{key}[{one['name']}].{place}"
    for one in pod.get("volumes", ()):
        for reference, place in _of_volume(one):
            yield reference, f"volumes[{one['name']}].{place}"


def _of_container(container: Mapping[str, Any]) -> Iterator[tuple[Reference, str]]:
    for one in container.get("env", ()):
        source = one.get("valueFrom") or {}
        for field, resource in (("secretKeyRef", SECRETS), ("configMapKeyRef", CONFIG_MAPS)):
            named = source.get(field)
            if _is_needed(named):
                yield Reference(resource, named["name"], named.get("key")), f"env[{one['name']}]"
    for at, one in enumerate(container.get("envFrom", ())):
        for field, resource in (("secretRef", SECRETS), ("configMapRef", CONFIG_MAPS)):
            if _is_needed(one.get(field)):
                yield Reference(resource, one[field]["name"]), f"envFrom[{at}].{field}"


def _of_volume(volume: Mapping[str, Any]) -> Iterator[tuple[Reference, str]]:
    claim = lookup(volume, ("persistentVolumeClaim", "claimName"))
    if claim is not None:
        yield Reference(CLAIMS, claim), "persistentVolumeClaim"
    secret = volume.get("secret")
    if isinstance(secret, Mapping) and secret.get("secretName") and not secret.get("optional"):
        yield from _keys(SECRETS, secret["secretName"], secret, "secret")
    if _is_needed(volume.get("configMap")):
        yield from _keys(CONFIG_MAPS, volume["configMap"]["name"], volume["configMap"], "configMap")
    for at, source in enumerate(lookup(volume, ("projected", "sources"), ())):
        for field, resource in (("secret", SECRETS), ("configMap", CONFIG_MAPS)):
            if _is_needed(source.get(field)):
                place = f"projected.sources[{at}].{field}"
                yield from _keys(resource, source[field]["name"], source[field], place)


def _keys(
    resource: Resource, name: str, source: Mapping[str, Any], place: str
) -> Iterator[tuple[Reference, str]]:
    """Without `items` a volume has all existing keys, so none is required."""
    items = source.get("items") or ()
    if not items:
        yield Reference(resource, name), place
    for at, item in enumerate(items):
        yield Reference(resource, name, item.get("key")), f"{place}.items[{at}]"


def _is_needed(source: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(source, Mapping) and bool(source.get("name")) and not source.get("optional")


def _lack(api: ApiReader, namespace: str | None, reference: Reference) -> str | None:
    """What is missing, as a sentence; None if nothing is, or if the user may not read it."""
    resource, name, key = reference.resource, reference.name, reference.key
    try:
        item = api.get(resource, namespace, name)
    except Unanswered:
        raise
    except BackendError:
        return None
    where = f"namespace {namespace}" if namespace else "the cluster"
    if item is None:
        return f"must be a {resource.kind} of {where}; {name} does not exist"
    keys = {*lookup(item, ("data",), {}), *lookup(item, ("binaryData",), {})}
    if key is not None and key not in keys:
        there = ", ".join(sorted(keys)) or "none"
        return f"must be a key of {resource.kind} {name} of {where}; it has no {key}, only {there}"
    return None


def _to_create(namespace: str, reference: Reference, path: str) -> str:
    resource, name, key = reference.resource, reference.name, reference.key
    of = f"kubectl -n {namespace}"
    if PULLS.search(path):
        return f"`{of} create secret docker-registry {name} …`, or remove it"
    from_file = f" --from-file={key}=FILE" if key is not None else " --from-env-file=FILE"
    words: Mapping[Resource, str] = {
        SECRETS: f"`{of} create secret generic {name}{from_file}`",
        CONFIG_MAPS: f"`{of} create configmap {name}{from_file}`",
        CLAIMS: f"use one that `{of} get pvc` shows, or create it",
        ACCOUNTS: "remove it: then ndctl creates one with the required rights",
        PRIORITIES: "use one that `kubectl get priorityclass` shows",
        RUNTIME_CLASSES: "use one that `kubectl get runtimeclass` shows",
    }
    return words[resource]


def object_there(
    api: ApiReader, reference: Reference, namespace: str, *, what: str, fix: str
) -> Finding:
    """Whether the object exists; `fix` is for the case that it does not."""
    name = reference.name
    try:
        item = api.get(reference.resource, namespace, name)
    except Forbidden as exc:
        found = f"{name}; no right to check whether it exists ({exc.message})"
        return Finding(what=what, verdict="note", found=found)
    if item is None:
        found = f"there is no {name} in {namespace}"
        return Finding(what=what, verdict="stops", found=found, fix=fix)
    return Finding(what=what, verdict="ok", found=name)


def get_or_none(
    api: ApiReader, resource: Resource, namespace: str | None, name: str
) -> Object | None:
    """None also if it may not be read."""
    with contextlib.suppress(BackendError):
        return api.get(resource, namespace, name)
    return None

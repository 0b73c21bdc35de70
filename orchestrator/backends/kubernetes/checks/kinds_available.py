"""Checks that the cluster has the kinds of a job's objects, with all fields that are sent."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Missing
from orchestrator.backends.kubernetes.api.kind_schemas import KindSchemas, Lacking, has, lacking
from orchestrator.backends.kubernetes.render import objects
from orchestrator.backends.kubernetes.resources import (
    JOB_KINDS,
    JobKind,
    Object,
    Resource,
    resource_of,
)
from orchestrator.contract.check_results import Finding
from orchestrator.contract.codec import nearest
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.contract.submission_payload import Handover

GROUPS = {kind.resource.group for kind in JOB_KINDS.values()}


def kind_there(schemas: KindSchemas, name: Kind, *, wanted: bool = True) -> Finding:
    """Whether the cluster serves the kind, with an operator that is new enough. If it is not
    `wanted` by a job, a missing kind is only a note."""
    kind = JOB_KINDS[name]
    resource = kind.resource
    versions = _served(schemas, resource)
    what, found = resource.kind.lower(), f"{resource.word} {', '.join(versions)}".strip()
    if resource.version in versions:
        if not (absent := _absent(schemas, kind)):
            return Finding(what=what, verdict="ok", found=found)
        found = (
            f"{kind.operator} is older than {kind.since}: its {resource.kind} has no"
            f" {' and no '.join(absent)}, so the cluster would drop it"
        )
    else:
        found = f"served as {found}" if versions else f"{kind.operator} is not installed"
    if not wanted:
        return Finding(what=what, verdict="note", found=found)
    return Finding(
        what=what,
        verdict="stops",
        found=f"{found}; cluster.kubernetes.kind={name} needs {kind.since} or newer, with"
        f" {resource.version}",
        fix=f"{kind.install}  (as an administrator), or set cluster.kubernetes.kind to one that"
        " is installed",
    )


def _served(schemas: KindSchemas, resource: Resource) -> list[str]:
    """The versions in which `resource` is served; empty if it is not."""
    try:
        group = schemas.api.read(f"/apis/{resource.group}")
        versions = [one["version"] for one in group["versions"]]
        return [one for one in versions if _has_kind(schemas.api.read, resource, one)]
    except Missing:
        return []


def _has_kind(read: Any, resource: Resource, version: str) -> bool:
    known = read(f"/apis/{resource.group}/{version}").get("resources", ())
    return any(one["name"] == resource.plural for one in known)


def _absent(schemas: KindSchemas, kind: JobKind) -> list[str]:
    """Fields of the operator's first suitable version that the installed kind lacks."""
    schema = schemas.of(kind.resource)
    if schema is None:
        return []
    return [".".join(path) for path in kind.needs if not has(schema, path)]


def fields_unknown(schemas: KindSchemas, handover: Handover, namespace: str) -> Iterator[Finding]:
    """Fields of the job's objects that the kinds of this cluster lack, which old API servers drop
    without an error. If ndctl itself sets the field, the operator is too old; otherwise the field
    comes from `pod_template`."""
    spec = handover.launch.kubernetes_spec
    plain = replace(handover.launch, kubernetes=replace(spec, pod_template={}))
    without = replace(handover, job=replace(handover.job, launch=plain))
    own = {one.path for _, one in _lacking(schemas, objects(without, namespace))}
    reported: set[str] = set()
    for resource, one in _lacking(schemas, objects(handover, namespace)):
        finding = _too_old(resource, one) if one.path in own else _unknown(resource, one)
        if finding.what not in reported:  # Master and Worker have the same template
            reported.add(finding.what)
            yield finding


def _lacking(
    schemas: KindSchemas, items: list[dict[str, Any]]
) -> Iterator[tuple[Resource, Lacking]]:
    for item in items:
        if _group_of(item) in GROUPS:
            resource = resource_of(item)
            schema = schemas.of(resource)
            for one in lacking(item, schema) if schema is not None else ():
                yield resource, one


def _group_of(item: Object) -> str:
    return str(item["apiVersion"]).partition("/")[0]


def _too_old(resource: Resource, one: Lacking) -> Finding:
    kind = next(kind for kind in JOB_KINDS.values() if kind.resource.group == resource.group)
    return Finding(
        what=f"{resource.kind.lower()} {one}",
        verdict="stops",
        found=f"the {resource.kind} of this cluster has no such field, so the cluster would drop"
        f" it: {kind.operator} is older than {kind.since}",
        fix=f"{kind.install}  (as an administrator)",
    )


def _unknown(resource: Resource, one: Lacking) -> Finding:
    field, path = str(one.path[-1]), _in_template(one)
    near = nearest(field, one.known)
    kind: Mapping[str, str] = {kind.resource.group: kind.operator for kind in JOB_KINDS.values()}
    return Finding(
        what=f"cluster.kubernetes.pod_template.{path}",
        verdict="stops",
        found=f"must be a field that the {resource.kind} of this cluster has; it has no {field},"
        " so the cluster would drop it",
        fix=f"did you mean {near}?"
        if near
        else f"remove it, or install a newer version of {kind[resource.group]}",
    )


def _in_template(one: Lacking) -> str:
    """The path inside the pod template, which is the innermost template."""
    whole = str(one)
    _, found, below = whole.rpartition(".template.")
    return below if found else whole

"""All checks of a launch before any object is created: what stops it, and what may delay it.

`ndctl submit`, its dry run and `ndctl doctor SPEC` use the same list.
"""

from collections.abc import Iterator
from typing import Any

from orchestrator.backends.kubernetes.api.api_errors import Forbidden, RuntimeUnseen
from orchestrator.backends.kubernetes.api.client import ApiReader
from orchestrator.backends.kubernetes.api.kind_schemas import KindSchemas
from orchestrator.backends.kubernetes.checks import permissions
from orchestrator.backends.kubernetes.checks.kinds_available import fields_unknown, kind_there
from orchestrator.backends.kubernetes.checks.nodes_available import nodes_there
from orchestrator.backends.kubernetes.checks.pod_security import (
    BURSTABLE,
    INIT_CONTAINER,
    level_of,
    privileges,
    to_allow,
)
from orchestrator.backends.kubernetes.checks.queues import gang_there, queue_there
from orchestrator.backends.kubernetes.checks.references import AT, get_or_none, missing
from orchestrator.backends.kubernetes.observe.object_fields import LABEL
from orchestrator.backends.kubernetes.observe.observe import observe
from orchestrator.backends.kubernetes.render import mistakes, objects
from orchestrator.backends.kubernetes.resources import (
    CLAIMS,
    JOB_KINDS,
    NAMESPACES,
    QUOTAS,
    ROLE_BINDINGS,
    JobKind,
    Object,
    lookup,
    name_of,
    resource_of,
)
from orchestrator.backends.kubernetes.submitting import strangers
from orchestrator.contract.check_results import Finding
from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, SpecError, Unanswered
from orchestrator.inventory.gpus import GpuTable
from orchestrator.inventory.kubernetes.quantities import quantity

SHARED = "ReadWriteMany"
RIGHTS = "rights"
"""Subject of findings about the user's rights."""


def check(
    api: ApiReader, namespace: str, handover: Handover, table: GpuTable
) -> tuple[Finding, ...]:
    """The findings of a job that can run.

    Raises:
        SpecError: with everything that stops the job, if the spec itself has mistakes.
        BackendError: the same, if only the cluster objects.
    """
    try:
        found = examine_job(api, namespace, handover, table)
    except Unanswered:
        objects(handover, namespace)  # mistakes in the spec are known without the API server
        raise
    stops = [one for one in found if one.verdict == "stops"]
    if not stops:
        return found
    said = "\n".join(f"{one.what}: {one.found}\n  fix: {one.fix}" for one in stops)
    message = (
        f"this job cannot run on Kubernetes (namespace {namespace}, {api.server}):\n  "
        + said.replace("\n", "\n  ")
    )
    if wrong := mistakes(handover):
        raise SpecError(message) from Invalid(wrong)
    raise BackendError(message)


def examine_job(
    api: ApiReader, namespace: str, handover: Handover, table: GpuTable
) -> tuple[Finding, ...]:
    """Mistakes in the spec, a dry run of each object, and checks of everything that they need.

    Raises:
        Unanswered: the API server is unreachable.
    """
    wrong = tuple(_stops(one) for one in mistakes(handover))
    there = namespace_there(api, namespace)
    if there.verdict == "stops":
        return (*wrong, there)  # without the namespace, all other checks would fail too
    cluster = _objects(api, namespace, handover) if not wrong else _kind(api, handover)
    around = (
        *missing(api, namespace, handover, of_pods=not wrong),
        *_around(api, namespace, handover, table),
    )
    warned = (
        Finding(what="api server warns", verdict="warns", found=text) for text in api.warnings
    )
    return (*wrong, there, *cluster, *around, *warned)


def _kind(api: ApiReader, handover: Handover) -> tuple[Finding, ...]:
    spec = handover.launch.kubernetes_spec
    return (kind_there(KindSchemas(api), spec.kind),)


def _objects(api: ApiReader, namespace: str, handover: Handover) -> tuple[Finding, ...]:
    """Checks of the rendered objects: their kinds, their fields, and a dry run of each."""
    launch, schemas = handover.launch, KindSchemas(api)
    spec = launch.kubernetes_spec
    kind = kind_there(schemas, spec.kind)
    known = kind.verdict == "ok"
    unknown = tuple(fields_unknown(schemas, handover, namespace)) if known else ()
    made = objects(handover, namespace)
    return (kind, *unknown, *_tried(api, namespace, launch, made, own_kind=known))


def _around(
    api: ApiReader, namespace: str, handover: Handover, table: GpuTable
) -> Iterator[Finding]:
    """Checks of what is already in the cluster."""
    launch = handover.launch
    spec, hosts = launch.kubernetes_spec, len(launch.hosts)
    yield from _of_other_kinds(api, namespace, launch)
    yield from _of_strangers(api, namespace, spec, launch.job)
    yield from _runs(api, namespace, spec, hosts)
    yield from _security(api, namespace, spec, hosts)
    if spec.guaranteed and spec.kind == "pytorchjob" and hosts > 1:
        fix = "set that template, or use kind: jobset, whose pods have no such container"
        yield Finding(what=f"{AT}.guaranteed", verdict="warns", found=BURSTABLE, fix=fix)
    yield from _quotas(api, namespace, launch)
    yield from queue_there(api, namespace, spec)
    yield from gang_there(spec, hosts)
    yield from nodes_there(api, handover.job.plan, launch, table)


def namespace_there(api: ApiReader, namespace: str) -> Finding:
    what = "namespace"
    try:
        there = api.get(NAMESPACES, None, namespace)
    except Forbidden:
        found = f"{namespace}; no right to check whether it exists"
        return Finding(what=what, verdict="note", found=found)
    if there is None:
        fix = f"`kubectl create namespace {namespace}`, or set {AT}.namespace"
        found = f"there is no namespace {namespace}"
        return Finding(what=what, verdict="stops", found=found, fix=fix)
    phase = lookup(there, ("status", "phase"), "Active")
    if phase != "Active":
        fix = "wait until it is gone, and create it again"
        return Finding(what=what, verdict="stops", found=f"{namespace} is {phase}", fix=fix)
    return Finding(what=what, verdict="ok", found=namespace)


def _tried(
    api: ApiReader,
    namespace: str,
    launch: LaunchPlan,
    made: list[dict[str, Any]],
    *,
    own_kind: bool,
) -> Iterator[Finding]:
    """A dry run of each object. `own_kind`: the cluster has the job's kind."""
    spec = launch.kubernetes_spec
    kind = JOB_KINDS[spec.kind].resource
    submits = [one for one in permissions.needed(spec) if one.need == "submit"]
    lacking = permissions.missing(api, submits, namespace)
    if lacking:  # a dry run would report the same rights, one verb and object at a time
        refusal = permissions.refused(api, lacking, namespace, "nothing was submitted")
        yield Finding(what=RIGHTS, verdict="stops", found=refusal.message, fix=refusal.fix)
        return
    refused: dict[str, Finding] = {}
    for item in made:
        if not own_kind and resource_of(item).group == kind.group:
            continue
        if resource_of(item) == ROLE_BINDINGS:
            continue  # without the verb `bind`, it works only after its Role exists
        exc = _refusal(api, namespace, item)
        if exc is not None:
            what = f"{item['kind']} {name_of(item)}"
            finding = Finding(what=what, verdict="stops", found=exc.message, fix=exc.fix)
            refused.setdefault(exc.message, finding)  # several objects may need the same right
    yield from refused.values()
    if not refused:
        found = (
            f"{api.server} accepts the {len(made)} objects of {kind.kind} {namespace}/{launch.job}"
        )
        yield Finding(what="dry run", verdict="ok", found=found)


def _refusal(api: ApiReader, namespace: str, item: Object) -> BackendError | None:
    """Why the cluster refuses a dry run of the object."""
    try:
        api.apply(item, namespace, dry_run=True)
    except Unanswered:
        raise
    except RuntimeUnseen:
        # A dry run does not create the runtime that this webhook looks for. The API server has
        # checked the TrainJob's own fields before it called the webhook.
        return None
    except BackendError as exc:
        return exc
    return None


def _stops(problem: Problem) -> Finding:
    return Finding(what=problem.path, verdict="stops", found=problem.said, fix=problem.fix)


def _of_other_kinds(api: ApiReader, namespace: str, launch: LaunchPlan) -> Iterator[Finding]:
    """A job of another kind with the same name would share its run directory and its ConfigMap."""
    mine = launch.kubernetes_spec.kind
    for kind in (JOB_KINDS[name] for name in JOB_KINDS if name != mine):
        job = get_or_none(api, kind.resource, namespace, launch.job)
        if job is not None:
            limit = f"a name that no {kind.resource.kind} of namespace {namespace} has"
            fix = _room_for(JOB_KINDS[mine], kind, namespace, job)
            yield _stops(Problem(path="name", value=launch.job, limit=limit, fix=fix))


def _room_for(mine: JobKind, kind: JobKind, namespace: str, job: Object) -> str:
    """The fix for a name that an existing `job` of another kind has."""
    name, resource = name_of(job), kind.resource
    if observe(kind, name, job).ending is not None:
        return (
            f"`kubectl -n {namespace} delete {resource.word} {name}` makes room for a"
            f" {mine.resource.kind}, because that {resource.kind} has ended; or use another name"
        )
    # It may train, and it may be that of somebody else.
    made = lookup(job, ("metadata", "creationTimestamp"), "")
    is_ours = LABEL in lookup(job, ("metadata", "labels"), {})
    show = f"kubectl -n {namespace} describe {resource.word} {name}"
    if is_ours:
        show = f"ndctl status {name} -n {namespace}"
    return (
        f"use another name; that {resource.kind}, created at {made}, has not ended: `{show}` shows"
        " what it does"
    )


def _of_strangers(
    api: ApiReader, namespace: str, spec: KubernetesSpec, job: str
) -> Iterator[Finding]:
    """Existing objects with the name of a job's object are neither overwritten nor deleted."""
    for helper in strangers(api, namespace, spec, job):
        limit = f"such that {helper} is free: namespace {namespace} has one of another owner"
        yield _stops(Problem(path="name", value=job, limit=limit, fix="use another name"))


def _runs(api: ApiReader, namespace: str, spec: KubernetesSpec, hosts: int) -> Iterator[Finding]:
    """The volume with run directories, which all pods of a job read and write."""
    what, claim = "run volume", spec.runs.claim
    if claim is None and spec.runs.host_path is None:
        return  # already reported as a mistake in the spec
    if claim is None:
        found = f"{spec.runs.host_path} of each node; it must be the same file system on all nodes"
        yield Finding(what=what, verdict="note", found=found)
        return
    item = get_or_none(api, CLAIMS, namespace, claim)
    if item is None:
        return  # if it is missing, `missing` reports it
    modes = lookup(item, ("spec", "accessModes"), ())
    phase = lookup(item, ("status", "phase"), "Pending")
    found = f"{claim} is {phase}, {', '.join(modes)}"
    if SHARED not in modes and hosts > 1:
        fix = f"create it with a storage class of a shared file system and accessModes [{SHARED}]"
        yield Finding(what=what, verdict="stops", found=f"{found}; {hosts} hosts write", fix=fix)
    elif phase == "Lost":
        fix = "its volume was deleted: create another claim"
        yield Finding(what=what, verdict="stops", found=found, fix=fix)
    else:
        yield Finding(what=what, verdict="ok" if phase == "Bound" else "note", found=found)


def _security(
    api: ApiReader, namespace: str, spec: KubernetesSpec, hosts: int
) -> Iterator[Finding]:
    """Whether the namespace admits the job's pods. A dry run of the job does not create pods."""
    there = get_or_none(api, NAMESPACES, None, namespace)
    level, what = level_of(there or {}), "pod security"
    if level == "privileged":
        return
    asked = privileges(spec)
    for key in asked:
        yield _stops(
            Problem(
                path=f"{AT}.{key}",
                limit=f"unset: pods of namespace {namespace} must meet the standard {level}",
                fix="remove it, or have an administrator run"
                f" `{to_allow('privileged', namespace)}`",
            )
        )
    found = f"pods of {namespace} must meet the standard {level}"
    if level == "restricted" and spec.kind == "pytorchjob" and hosts != 1:
        fix = f"{to_allow('baseline', namespace)}  (as an administrator)"
        found = f"{found}: {INIT_CONTAINER}"
        yield Finding(what=what, verdict="warns", found=found, fix=fix)
    elif not asked:
        yield Finding(what=what, verdict="ok", found=found)


def _quotas(api: ApiReader, namespace: str, launch: LaunchPlan) -> Iterator[Finding]:
    """Quotas that the job can never fit into. If it only does not fit now, its pods wait."""
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
                yield _stops(
                    Problem(
                        path=key,
                        value=amount,
                        limit=f"such that {total} fit into {hard[resource]}, the quota"
                        f" {name_of(quota)}'s {resource}",
                        fix="request less or fewer hosts, or get more quota",
                    )
                )


def _wanted(launch: LaunchPlan) -> dict[str, tuple[str, str]]:
    """Key of a quota -> the key of the spec, and the amount that one pod uses."""
    spec = launch.kubernetes_spec
    found = {"pods": ("cluster.hosts", "1"), "count/pods": ("cluster.hosts", "1")}
    if spec.gpu_resource:
        gpus = ("cluster.gpus_per_host", str(launch.devices_per_host))
        found[f"requests.{spec.gpu_resource}"] = gpus
    if spec.cpu:
        found |= dict.fromkeys(("cpu", "requests.cpu"), (f"{AT}.cpu", spec.cpu))
    if spec.memory:
        keys = ("memory", "requests.memory", "limits.memory")
        found |= dict.fromkeys(keys, (f"{AT}.memory", spec.memory))
    if spec.cpu and spec.guaranteed:
        found["limits.cpu"] = (f"{AT}.cpu", spec.cpu)
    return found

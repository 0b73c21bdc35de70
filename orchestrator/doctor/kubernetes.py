"""Check a Kubernetes cluster and the user's permissions. Read-only."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import ApiReader
from orchestrator.backends.kubernetes.api.kind_schemas import KindSchemas
from orchestrator.backends.kubernetes.checks import permissions
from orchestrator.backends.kubernetes.checks.kinds_available import kind_there
from orchestrator.backends.kubernetes.checks.launch_checks import (
    RIGHTS,
    examine_job,
    namespace_there,
)
from orchestrator.backends.kubernetes.checks.permissions import Right
from orchestrator.backends.kubernetes.checks.queues import queue_there
from orchestrator.backends.kubernetes.checks.references import Reference, object_there
from orchestrator.backends.kubernetes.controller.controller_client import LEASE
from orchestrator.backends.kubernetes.inventory import WITHOUT_NODES
from orchestrator.backends.kubernetes.node_affinity import INSTALL
from orchestrator.backends.kubernetes.pod_deletion import NAMED
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    JOB_KINDS,
    LEASES,
    NODES,
    PODS,
    lookup,
)
from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, NdctlError
from orchestrator.inventory.gpus import GpuTable
from orchestrator.inventory.kubernetes.nodes import parse_node
from orchestrator.inventory.kubernetes.standing import shut
from orchestrator.inventory.kubernetes.taints import tolerations_of


class Job(Struct, frozen=True):
    handover: Handover
    table: GpuTable
    """GPU models by node labels."""


def examine_kubernetes(
    api: ApiReader, spec: KubernetesSpec, job: Job | None = None
) -> tuple[Finding, ...]:
    """All checks; with a `job` also the checks of `submit`."""
    try:
        return tuple(_examined(api, spec, job))
    except BackendError as exc:
        return (no_api_server(exc),)


def no_api_server(exc: NdctlError) -> Finding:
    """The finding for an error that stops all other questions."""
    return Finding(what="api server", verdict="stops", found=exc.message, fix=exc.fix)


def _examined(api: ApiReader, spec: KubernetesSpec, job: Job | None) -> Iterator[Finding]:
    version = str(api.read("/version").get("gitVersion", "of unknown version"))
    found = f"Kubernetes {version} at {api.server}, context {api.context}"
    yield Finding(what="api server", verdict="ok", found=found)
    namespace, schemas = spec.namespace or api.namespace, KindSchemas(api)
    for name in JOB_KINDS:
        if job is None or name != spec.kind:
            yield kind_there(schemas, name, wanted=name == spec.kind)
    yield from _rights(api, spec, namespace)
    yield _cluster_rights(api, described=job is not None)
    yield _controller(api, spec, namespace)
    if job is not None:
        of_job = examine_job(api, namespace, job.handover, job.table)
        yield from (one for one in of_job if one.what != RIGHTS)  # already reported by `_rights`
        return
    yield namespace_there(api, namespace)
    if spec.service_account is not None:
        yield object_there(
            api,
            Reference(ACCOUNTS, spec.service_account),
            namespace,
            what="service account",
            fix="remove cluster.kubernetes.service_account, and the job gets its own",
        )
    yield _devices(api, spec)
    yield from queue_there(api, namespace, spec)
    for text in api.warnings:
        yield Finding(what="api server warns", verdict="warns", found=text)


def _rights(api: ApiReader, spec: KubernetesSpec, namespace: str) -> Iterator[Finding]:
    wanted = permissions.needed(spec)
    missing = permissions.missing(api, wanted, namespace)
    if not missing:
        found = f"all {len(wanted)} for submit, status and cancel in {namespace}"
        yield Finding(what="rights", verdict="ok", found=found)
    else:
        user = permissions.user_of(api, missing, namespace) or "you"
        yield Finding(
            what="rights",
            verdict="stops" if any(one.need == "submit" for one in missing) else "warns",
            found=f"{user} may not {permissions.listing(missing)} in {namespace}{_for(missing)}",
            fix=f"ask an administrator for a Role in {namespace} with rules:"
            f" [{', '.join(permissions.rules_of(missing))}]",
        )


def _cluster_rights(api: ApiReader, *, described: bool) -> Finding:
    """`described`: the spec describes the nodes, so they need not be listed."""
    what = "cluster rights"
    wide = permissions.missing(api, (Right("list", NODES), Right("list", PODS)), None)
    if not wide:
        return Finding(what=what, verdict="ok", found="may list nodes and all pods")
    words = " or ".join(f"list {right.word}" for right in wide)
    return Finding(
        what=what,
        verdict="note" if described else "warns",
        found=f"you may not {words} in the whole cluster",
        fix=f"{WITHOUT_NODES}; or ask for `kubectl create clusterrole ndctl-inventory --verb=list"
        " --resource=nodes,pods` and a clusterrolebinding",
    )


def _for(missing: Sequence[Right]) -> str:
    """What the missing rights prevent, unless they prevent everything."""
    needs = {one.need for one in missing}
    if "submit" in needs:
        return ""
    return ": `submit --resume` and --new are refused" if "again" in needs else ""


def _controller(api: ApiReader, spec: KubernetesSpec, namespace: str) -> Finding:
    """Whether a controller runs. Jobs run without one, but lack some functions."""
    what = "controller"
    try:
        lease = api.get(LEASES, namespace, LEASE)
    except BackendError as exc:
        found = f"unknown for {namespace}: not allowed to check ({exc.message})"
        return Finding(what=what, verdict="note", found=found)
    if holder := lookup(lease, ("spec", "holderIdentity"), ""):
        return Finding(what=what, verdict="ok", found=f"{holder} manages jobs in {namespace}")
    kind = JOB_KINDS[spec.kind].resource.kind
    lost = (
        f"; pods of a {kind} on an unreachable node stay until a person deletes them"
        if spec.kind not in NAMED
        else ""
    )
    return Finding(
        what=what,
        verdict="warns" if lost else "note",
        found=f"none manages only {namespace}; without a controller new pods may be scheduled on a"
        f" node that a job excluded{lost}",
        fix=f"an administrator runs `{INSTALL}`; nothing to do if a controller manages all"
        " namespaces",
    )


def _devices(api: ApiReader, spec: KubernetesSpec) -> Finding:
    try:
        nodes = [parse_node(item) for item in api.list(NODES, None).items]
    except Forbidden as exc:
        return Finding(what="nodes", verdict="note", found=f"unknown: {exc.message}")
    resource = spec.gpu_resource
    having = [node for node in nodes if resource is None or node.can_give(resource) > 0]
    tolerations = tolerations_of(spec)
    usable = [node for node in having if not node.is_virtual and shut(node, tolerations) is None]
    of = f" with {resource}" if resource else ""
    found = f"{len(usable)} of {len(having)} nodes{of} accept pods; {len(nodes)} nodes in total"
    if usable:
        return Finding(what="nodes", verdict="ok", found=found)
    fix = "`ndctl inventory --backend kubernetes` shows the reason of each"
    if not having:
        known = sorted({name for node in nodes for name in node.allocatable if "/" in name})
        fix = f"set cluster.kubernetes.gpu_resource to one of {', '.join(known)}, or to null"
        if not known:
            fix = "install the device plugin (the GPU operator), or set gpu_resource to null"
    fix += "; if nodes are created on demand, give a spec with cluster.gpu"
    return Finding(what="nodes", verdict="warns", found=found, fix=fix)

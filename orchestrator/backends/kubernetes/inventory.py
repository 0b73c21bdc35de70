"""Read nodes and the resources that pods use from the API server."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Expired, Forbidden, Missing
from orchestrator.backends.kubernetes.api.client import ApiReader
from orchestrator.backends.kubernetes.resources import NODES, PODS, Object, Resource, lookup
from orchestrator.contract.devices import GPU_NAMES
from orchestrator.contract.files.env import KUBERNETES_GPUS
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.errors import BackendError, PlanError
from orchestrator.inventory.gpus import GpuTable
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.kubernetes.gpus import KINDS, features
from orchestrator.inventory.kubernetes.inventory import Use, inventory_of, use_of
from orchestrator.inventory.kubernetes.nodes import Node, parse_node
from orchestrator.inventory.kubernetes.pods import Taken, taken

BOUND = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
KUEUE = "kueue.x-k8s.io"
WITHOUT_NODES = (
    f"set cluster.gpu to one of {', '.join(GPU_NAMES)}: then ndctl reads no nodes, and none must"
    " exist yet; or list the hosts with --inventory FILE"
)
MAKERS = {"karpenter.sh": "Karpenter", "autoscaling.x-k8s.io": "an autoscaler"}
"""API groups of controllers that create nodes for waiting pods. (The cluster autoscaler serves
none: with it the spec must set `cluster.gpu`.)"""
ANY = tuple({*Use().resources, *Use(device=None).resources})
"""Resource names of GPUs, used without a spec."""


class Cluster(Struct, frozen=True, kw_only=True):
    """One snapshot of the cluster."""

    nodes: tuple[Node, ...]
    used: Mapping[str, Taken]
    notes: tuple[str, ...] = ()

    def inventory(self, table: GpuTable, use: Use) -> Inventory:
        return inventory_of(self.nodes, self.used, table, use)


class HostsFor(Struct, frozen=True, kw_only=True):
    """The hosts that a job is planned for."""

    inventory: Inventory
    nodes: tuple[Node, ...]
    kueue: tuple[str, ...] | None = None
    """The node labels in Kueue's Topology; None if it could not be read."""
    notes: tuple[str, ...] = ()
    """A remark for the user."""
    to_come: str | None = None
    """Profile of nodes created on demand, if too few nodes exist now."""
    advice: str = ""
    """The end of a fix if too few nodes exist: what to set if more will be created."""


def read_cluster(
    api: ApiReader, namespace: str | None = None, resources: Sequence[str] = ANY
) -> Cluster:
    """All nodes, and the `resources` that pods use: pods of all namespaces or, without the right to
    list them, of `namespace`, with a note.

    Raises:
        BackendError: the API server is unreachable, or the right to list nodes is missing.
    """
    try:
        nodes = tuple(parse_node(item) for item in _listed(api, NODES, None))
    except Forbidden as exc:
        raise Forbidden(exc.message, fix=f"{exc.fix}\n  or {WITHOUT_NODES}") from exc
    pods, notes = _pods(api, namespace or api.namespace)
    return Cluster(nodes=nodes, used=taken(pods, resources), notes=notes)


def _pods(api: ApiReader, namespace: str) -> tuple[Sequence[Object], tuple[str, ...]]:
    try:
        return _listed(api, PODS, None), ()
    except Forbidden as exc:
        note = f"{exc.message}: the usage of pods in other namespaces is unknown, so"
    try:
        own = _listed(api, PODS, namespace)
    except Forbidden:
        return (), (f"{note} all devices count as free",)
    return own, (f"{note} only devices used by pods of {namespace} are excluded",)


def _listed(api: ApiReader, resource: Resource, namespace: str | None) -> tuple[Object, ...]:
    """Lists all objects; starts again once if the continue token expired."""
    fields = BOUND if resource is PODS else ""
    try:
        return api.list(resource, namespace, fields=fields).items
    except Expired:
        return api.list(resource, namespace, fields=fields).items


def usual(cluster: Cluster) -> Use:
    """The device to read without a spec: GPUs, or CPUs if no node has GPUs."""
    use = Use()
    has_gpus = any(use.device in node.capacity for node in cluster.nodes)
    return use if has_gpus else replace(use, device=None)


def hosts_for(api: ApiReader, table: GpuTable, cluster: ClusterSpec) -> HostsFor:
    """The hosts to plan a job for.

    These are the free hosts. If they are too few, busy hosts are included, because the job can
    wait. If all are too few, and a queue or an autoscaler creates nodes on demand, future ones are
    too.
    """
    spec, use = cluster.kubernetes, use_of(cluster)
    seen = read_cluster(api, spec.namespace, use.resources)
    found = HostsFor(
        inventory=seen.inventory(table, use),
        nodes=seen.nodes,
        kueue=kueue_levels(api) if spec.queue else None,
        notes=seen.notes,
    )
    wanted, devices = cluster.hosts + cluster.spare_hosts, cluster.gpus_per_host
    _check_known(found, use, devices)
    if (count := len(found.inventory.with_devices(devices))) >= wanted:
        return found
    later = seen.inventory(table, replace(use, patient=True))
    if (in_all := len(later.with_devices(devices))) > count:
        waits = "in the queue" if spec.queue else "until other users' pods end"
        note = f"{count} of the {wanted} hosts are free now: the plan also uses busy hosts,"
        notes = (*found.notes, f"{note} so the job waits {waits}")
        found = replace(found, inventory=later, notes=notes)
    return found if in_all >= wanted else _with_those_to_come(api, found, cluster, in_all)


def _with_those_to_come(
    api: ApiReader, found: HostsFor, cluster: ClusterSpec, in_all: int
) -> HostsFor:
    """For a job that requests more than the `in_all` existing hosts."""
    kinds = {
        host.profile.name
        for host in found.inventory.hosts
        if host.profile and host.state != "not selected"
    }
    kind = kinds.pop() if len(kinds) == 1 else None
    maker = f"queue {cluster.kubernetes.queue}" if cluster.kubernetes.queue else makes_nodes(api)
    if maker is None or kind is None:
        name = kind or f"one of {', '.join(GPU_NAMES)}"
        advice = f"; where nodes are created on demand, set cluster.gpu to {name}: then none must"
        return replace(found, advice=f"{advice} exist yet")
    wanted = cluster.hosts + cluster.spare_hosts
    note = f"{in_all} of the {wanted} hosts exist: planned for {wanted} of {kind} anyway,"
    notes = (*found.notes, f"{note} because {maker} may add them")
    return replace(found, to_come=kind, notes=notes)


def makes_nodes(api: ApiReader) -> str | None:
    """What creates nodes on demand in this cluster; None if unknown."""
    try:
        groups = api.read("/apis").get("groups", ())
    except BackendError:
        return None
    return next((MAKERS[one["name"]] for one in groups if one["name"] in MAKERS), None)


def _check_known(found: HostsFor, use: Use, devices: int) -> None:
    """Raises PlanError if no suitable host has a known GPU model. The fix says how a site names
    it."""
    hosts = found.inventory.hosts
    if not hosts:
        known = {name for node in found.nodes for name in node.capacity if "/" in name}
        there = f"; found: {', '.join(sorted(known))}" if known else ""
        raise PlanError(
            f"none of the {len(found.nodes)} nodes has {use.device}{there}",
            fix="set cluster.kubernetes.gpu_resource to the device plugin's resource name, or to"
            f" null for ranks on CPUs; where nodes are created on demand, {WITHOUT_NODES}",
        )
    able = [host for host in hosts if host.devices >= devices]
    if not able or any(host.profile for host in able):
        return
    node = next(node for node in found.nodes if node.name == able[0].name)
    product = node.labels.get(KINDS[0])
    said = f"{KINDS[0]}={product}" if product else f"no label {KINDS[0]}"
    words = features(node)
    if words:
        said += f" ({', '.join(words)})"
    entry = f"feature: {words[0].lower()}" if words and not product else f'type: "{product or ""}"'
    raise PlanError(
        f"unknown GPU model: {node.name} has {said}",
        fix=f"write it into a file, for example gpus: [{{{entry.lower()}, profile: h100-sxm-80gb}}]"
        f", and name that in {KUBERNETES_GPUS}; or {WITHOUT_NODES}",
    )


def kueue_levels(api: ApiReader) -> tuple[str, ...] | None:
    """Node labels in every Topology of Kueue; None if unknown."""
    try:
        group = api.read(f"/apis/{KUEUE}")
        version = group["preferredVersion"]["version"]
        kind = Resource(KUEUE, version, "topologies", "Topology", namespaced=False)
        items = api.list(kind, None).items
    except Missing:
        return ()  # no Kueue, or one without topologies
    except BackendError:
        return None
    each = [
        [level["nodeLabel"] for level in lookup(item, ("spec", "levels"), ())] for item in items
    ]
    return tuple(label for label in each[0] if all(label in one for one in each)) if each else ()

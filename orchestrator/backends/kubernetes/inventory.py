"""Asks the API server what nodes there are, and what pods take of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from orchestrator.backends.kubernetes.api import Listed
from orchestrator.backends.kubernetes.refusals import Expired, Forbidden, Missing
from orchestrator.backends.kubernetes.resources import NODES, PODS, Object, Resource, lookup
from orchestrator.cluster.gpus import GpuTable
from orchestrator.cluster.inventory import Inventory
from orchestrator.cluster.kubernetes.gpus import KINDS, features
from orchestrator.cluster.kubernetes.inventory import Use, inventory_of, use_of
from orchestrator.cluster.kubernetes.nodes import Node, parse_node
from orchestrator.cluster.kubernetes.pods import Taken, taken
from orchestrator.contract.env import KUBERNETES_GPUS
from orchestrator.contract.spec import ClusterSpec
from orchestrator.errors import BackendError, PlanError

BOUND = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
KUEUE = "kueue.x-k8s.io"
ANY = tuple({*Use().resources, *Use(device=None).resources})
"""What devices may be where no spec says it."""


class Reads(Protocol):
    """What of `Api` is used here."""

    @property
    def namespace(self) -> str: ...
    def read(self, path: str) -> Any: ...
    def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listed: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What Kubernetes said, at one moment."""

    nodes: tuple[Node, ...]
    used: Mapping[str, Taken]
    notes: tuple[str, ...] = ()

    def inventory(self, table: GpuTable, use: Use) -> Inventory:
        return inventory_of(self.nodes, self.used, table, use)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsFor:
    """What a job is planned for."""

    inventory: Inventory
    nodes: tuple[Node, ...]
    kueue: tuple[str, ...] | None = None
    """The labels that are levels of Kueue's Topology; None where these were not read."""
    notes: tuple[str, ...] = ()
    """What a person should know of it."""


def read_cluster(
    api: Reads, namespace: str | None = None, resources: Sequence[str] = ANY
) -> Cluster:
    """Every node, with what pods take of `resources`: those of all namespaces, or where this may
    not be asked those of `namespace`, which a note says then.

    Raises BackendError when the API server does not answer, or does not let us list nodes.
    """
    try:
        nodes = tuple(parse_node(item) for item in _listed(api, NODES, None))
    except Forbidden as exc:
        fix = f"{exc.fix}\n  or give the hosts with --inventory FILE"
        raise Forbidden(exc.message, fix=fix) from exc
    pods, notes = _pods(api, namespace or api.namespace)
    return Cluster(nodes=nodes, used=taken(pods, resources), notes=notes)


def _pods(api: Reads, namespace: str) -> tuple[Sequence[Object], tuple[str, ...]]:
    try:
        return _listed(api, PODS, None), ()
    except Forbidden as exc:
        note = f"{exc.message}: what pods of other namespaces take of the nodes is not known, so"
    try:
        own = _listed(api, PODS, namespace)
    except Forbidden:
        return (), (f"{note} all devices count as free",)
    return own, (f"{note} only those that pods of {namespace} take are left out",)


def _listed(api: Reads, resource: Resource, namespace: str | None) -> tuple[Object, ...]:
    """In pages; from the start again where the pages that are left have expired meanwhile."""
    fields = BOUND if resource is PODS else ""
    try:
        return api.list(resource, namespace, fields=fields).items
    except Expired:
        return api.list(resource, namespace, fields=fields).items


def usual(cluster: Cluster) -> Use:
    """What is looked at without a spec: GPUs, or CPUs where no node has any."""
    use = Use()
    has_gpus = any(use.device in node.capacity for node in cluster.nodes)
    return use if has_gpus else replace(use, device=None)


def hosts_for(api: Reads, table: GpuTable, cluster: ClusterSpec) -> HostsFor:
    """The hosts to plan a job for.

    Those that are free; where these are too few, those as well that other pods use now, for the
    job can wait.
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
    if len(later.with_devices(devices)) <= count:
        return found
    waits = "in the queue" if spec.queue else "until pods of others have ended"
    note = f"{count} of the {wanted} hosts are free now: planned for hosts that are busy as well,"
    return replace(found, inventory=later, notes=(*found.notes, f"{note} so the job waits {waits}"))


def _check_known(found: HostsFor, use: Use, devices: int) -> None:
    """Without a profile nothing can be planned; what a site has to say where its labels do not."""
    hosts = found.inventory.hosts
    if not hosts:
        known = {name for node in found.nodes for name in node.capacity if "/" in name}
        there = f"; they have {', '.join(sorted(known))}" if known else ""
        raise PlanError(
            f"none of the {len(found.nodes)} nodes has {use.device}{there}",
            fix="set cluster.kubernetes.gpu_resource to what the device plugin calls them, or to"
            " null for ranks on CPUs",
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
        f"what the GPUs are is not known: {node.name} has {said}",
        fix=f"write it into a file, for example gpus: [{{{entry.lower()}, profile: h100-sxm-80gb}}]"
        f", and name that in {KUBERNETES_GPUS}; or give the hosts with --inventory FILE",
    )


def kueue_levels(api: Reads) -> tuple[str, ...] | None:
    """Labels that are levels in every Topology of Kueue; None where there is no telling."""
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

"""Requests pods that are as near to each other as the hosts of the plan.

A request cannot name the plan's hosts, because they may be busy when the job starts. It names
labels: pods should run on nodes that share a value of them, and on devices of one kind.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec, TopologyRequest
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.kubernetes.gpus import KINDS
from orchestrator.inventory.kubernetes.nodes import Node
from orchestrator.inventory.kubernetes.topology import levels_of, switches_of


class Asked(Struct, frozen=True, kw_only=True):
    """What the plan adds to a spec, and notes for the user."""

    topology: TopologyRequest
    exclude: tuple[str, ...] = ()
    """Nodes with devices of another kind that no label distinguishes."""
    notes: tuple[str, ...] = ()


def request_of(
    plan: Plan,
    inventory: Inventory,
    nodes: Sequence[Node],
    spec: KubernetesSpec,
    *,
    spares: int = 0,
    kueue: Collection[str] | None = None,
) -> Asked:
    """The request for the hosts of `plan` and `spares` more.

    Args:
        kueue: labels that are levels of Kueue's Topology; None: unknown. Kueue would never admit a
            job that requests another label.
    """
    by_name = {node.name: node for node in nodes}
    able = [host for host in inventory.hosts if host.devices >= plan.ranks_per_host]
    kind, exclude = _kind(plan, able, by_name)
    total = len(plan.hosts) + spares
    if total == 1:
        return Asked(topology=TopologyRequest(nodes=kind), exclude=exclude)
    alike = [by_name[host.name] for host in able if _is_of(plan, host)]
    levels = _levels(alike, spec)
    preferred, notes = _preferred(levels, spec, kueue)
    found = TopologyRequest(
        preferred=preferred,
        levels=levels,
        nodes=kind,
        prefer_nodes=_planned(plan, alike, levels),
    )
    wide = plan.mesh.tp // plan.ranks_per_host
    if wide > 1:
        found, more = _in_blocks(found, plan, inventory, spec, (wide, total), kueue or ())
        notes += more
    return Asked(topology=found, exclude=exclude, notes=notes)


def request_of_spec(
    plan: Plan,
    inventory: Inventory,
    spec: KubernetesSpec,
    *,
    spares: int = 0,
    kueue: Collection[str] | None = None,
) -> Asked:
    """The request without knowing any nodes: pods should share a value of the spec's labels. A
    cluster ignores labels that its nodes do not have. `kueue` as for `request_of`."""
    total = len(plan.hosts) + spares
    if total == 1:
        return Asked(topology=TopologyRequest())
    preferred: str | None = None
    notes: tuple[str, ...] = ()
    if spec.queue is not None and spec.topology is None:
        preferred, notes = _preferred_unseen(spec, kueue)
    levels = () if spec.queue else spec.topology_labels
    found = TopologyRequest(preferred=preferred, levels=levels)
    wide = plan.mesh.tp // plan.ranks_per_host
    if wide > 1:
        found, more = _in_blocks(found, plan, inventory, spec, (wide, total), kueue or ())
        notes += more
    return Asked(topology=found, notes=notes)


def _preferred_unseen(
    spec: KubernetesSpec, kueue: Collection[str] | None
) -> tuple[str | None, tuple[str, ...]]:
    """Like `_preferred`, for the spec's labels. Kueue never admits a job that requests a level
    which its Topology lacks, so a level that was not checked is not requested."""
    known = [label for label in spec.topology_labels if label in (kueue or ())]
    if known:
        return known[-1], ()
    return None, (
        "Kueue is not asked for nodes that are near to each other: the spec does not name a"
        " label, such as cluster.kubernetes.topology: {preferred: topology.kubernetes.io/rack}",
    )


def _is_of(plan: Plan, host: Host) -> bool:
    return plan.profile is None or (host.profile is not None and host.profile.name == plan.profile)


def _kind(
    plan: Plan, able: Sequence[Host], by_name: Mapping[str, Node]
) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]:
    """What distinguishes the plan's kind of nodes from others with enough devices: a label with its
    values, or else the names of the other nodes."""
    ours = [by_name[host.name] for host in able if _is_of(plan, host)]
    others = [by_name[host.name] for host in able if not _is_of(plan, host)]
    if not ours or not others:
        return {}, ()
    for label in KINDS:
        values = {node.labels.get(label) for node in ours}
        if None not in values and not values & {node.labels.get(label) for node in others}:
            return {label: tuple(sorted(value for value in values if value))}, ()
    return {}, tuple(sorted(node.name for node in others))


def _levels(nodes: Sequence[Node], spec: KubernetesSpec) -> tuple[str, ...]:
    """Labels of which the nodes have more than one value."""
    labels = levels_of(nodes, spec.topology_labels)
    paths = [switches_of(node, labels) for node in nodes]
    return tuple(
        label for depth, label in enumerate(labels, 1) if len({path[:depth] for path in paths}) > 1
    )


def _preferred(
    levels: Sequence[str], spec: KubernetesSpec, kueue: Collection[str] | None
) -> tuple[str | None, tuple[str, ...]]:
    """The innermost level that Kueue knows. Kueue tries it, then outer levels, then several."""
    if spec.queue is None or not levels:
        return None, ()
    known = [label for label in levels if label in (kueue or ())]
    if known:
        return known[-1], ()
    why = "its Topology objects cannot be read" if kueue is None else "its Topology has none of"
    said = why if kueue is None else f"{why} {', '.join(levels)}"
    return None, (f"Kueue is not asked for nodes that are near to each other: {said}",)


def _planned(
    plan: Plan, nodes: Sequence[Node], levels: Sequence[str]
) -> Mapping[str, tuple[str, ...]]:
    """Values of the innermost level on the plan's hosts, unless the plan has all values."""
    if not levels:
        return {}
    label = levels[-1]
    there = {node.labels.get(label) for node in nodes}
    values = {node.labels.get(label) for node in nodes if node.name in plan.hosts}
    if None in values or values == there:
        return {}
    return {label: tuple(sorted(value for value in values if value))}


def _in_blocks(
    asked: TopologyRequest,
    plan: Plan,
    inventory: Inventory,
    spec: KubernetesSpec,
    sizes: tuple[int, int],
    kueue: Collection[str],
) -> tuple[TopologyRequest, tuple[str, ...]]:
    """For tp groups of `sizes[0]` hosts, of `sizes[1]` in total, that each need one NVLink
    block."""
    (wide, total), label = sizes, spec.nvlink_label
    blocks = {host.nvlink_block for host in inventory.hosts if host.name in plan.hosts}
    if len(blocks) == 1 and (spec.queue is None or label in kueue):
        return replace(asked, required=label, preferred=None), ()
    if spec.queue and label in kueue and spec.kind != "pytorchjob" and total % wide == 0:
        return replace(asked, slice=label, slice_size=wide), ()
    note = f"tp={plan.mesh.tp} needs every {wide} hosts in one NVLink block; only Kueue can grant"
    note += f" that (with a queue, a kind other than pytorchjob, {label} among its levels, hosts"
    return asked, (f"{note} and spares a multiple of {wide}); ranks start only on such hosts",)


def requested(spec: KubernetesSpec, asked: Asked) -> KubernetesSpec:
    """`spec` with the plan's request. What the user wrote about topology wins."""
    topology = spec.topology if spec.topology is not None else asked.topology
    exclude = tuple(dict.fromkeys((*spec.exclude, *asked.exclude)))
    return replace(spec, topology=topology, exclude=exclude)

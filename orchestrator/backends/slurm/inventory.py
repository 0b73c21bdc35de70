"""Read the hosts of a Slurm cluster."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.backends.slurm.commands import Slurm
from orchestrator.contract.codec import Invalid
from orchestrator.contract.devices import GPU_NAMES
from orchestrator.contract.files.env import SLURM_GPUS
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.errors import BackendError, PlanError, SpecError
from orchestrator.inventory.gpus import GpuTable
from orchestrator.inventory.hosts import Inventory, State, grouped, state_of
from orchestrator.inventory.slurm.hostlist import fold
from orchestrator.inventory.slurm.inventory import Use, inventory_of, use_of
from orchestrator.inventory.slurm.nodes import Node, parse_nodes
from orchestrator.inventory.slurm.partitions import (
    Partition,
    not_up_fix,
    parse_partitions,
    partition_fix,
)
from orchestrator.inventory.slurm.topology import Topology, parse_topology

# -a includes nodes that are only in hidden partitions.
NODES = ("scontrol", "show", "nodes", "-a", "--details", "-o")
PARTITIONS = ("scontrol", "show", "partitions", "-a", "-o")
TOPOLOGY = ("scontrol", "show", "topology")

BUSY: frozenset[State] = frozenset({"busy"})
SHOWN = 4
"""Hosts that a note names for each reason."""


class Cluster(Struct, frozen=True, kw_only=True):
    """Nodes and topology from one query."""

    nodes: tuple[Node, ...]
    topology: Topology
    partition: Partition | None
    """The partition of the nodes; None: all nodes."""
    elsewhere: frozenset[str] = frozenset()
    """Nodes that are only in other partitions."""

    def inventory(self, table: GpuTable, use: Use) -> Inventory:
        found = inventory_of(self.nodes, self.topology, table, use)
        if self.partition is None or self.partition.state == "UP":
            return found
        why = f"partition {self.partition.name} is {self.partition.state}"
        hosts = (replace(host, state="drained", reason=why) for host in found.hosts)
        return Inventory(hosts=tuple(hosts))


class HostsFor(Struct, frozen=True, kw_only=True):
    """Hosts to plan a job for."""

    inventory: Inventory
    topology: Topology
    notes: tuple[str, ...] = ()
    """Printed with the plan."""


def hosts_for(
    slurm: Slurm, table: GpuTable, cluster: ClusterSpec, excluded: Mapping[str, str] | None = None
) -> HostsFor:
    """The hosts to plan a job for.

    Free hosts are used. If there are too few, busy hosts are included, because the job can wait in
    the queue. Hosts that are down or drained come last, because nobody knows when they are back.

    Args:
        excluded: hosts that ndctl excludes -> reason.
    """
    seen = read_cluster(slurm, ",".join(cluster.slurm.partitions) or None)
    try:
        use = use_of(cluster, excluded)
    except Invalid as exc:
        raise SpecError(f"cluster.slurm.nodelist or exclude: {exc}") from exc
    _check_names(seen, use)
    if seen.partition is not None and seen.partition.state != "UP":
        name, state = seen.partition.name, seen.partition.state
        raise PlanError(f"cluster.slurm.partition: {name} is {state}", fix=not_up_fix(name))
    wanted, devices = cluster.hosts + cluster.spare_hosts, cluster.gpus_per_host
    free = seen.inventory(table, use)
    _check_known(seen, free, devices)
    _check_selected(free, use, cluster)
    if (count := len(free.with_devices(devices))) >= wanted:
        return HostsFor(inventory=free, topology=seen.topology)
    later = seen.inventory(table, replace(use, waits_for=BUSY))
    found, notes = free, list[str]()
    if len(later.with_devices(devices)) > count:
        note = f"only {count} of {wanted} hosts are free; the plan includes busy hosts, so the job"
        found, notes = later, [f"{note} waits in the queue"]
    # Spares alone are no reason to plan for other hosts.
    if (up := len(found.with_devices(devices))) < cluster.hosts:
        at_last = seen.inventory(table, replace(use, waits_for=BUSY | {"drained"}))
        if away := _away(found, at_last, devices):
            note = f"only {up} of {wanted} hosts are up, so the job waits in the queue until more"
            found, notes = at_last, [f"{note} are back: {away}"]
    return HostsFor(inventory=found, topology=seen.topology, notes=tuple(notes))


def _away(found: Inventory, at_last: Inventory, devices: int) -> str:
    """The hosts that only `at_last` uses, with the reason; empty if there are none."""
    used = {host.name for host in at_last.with_devices(devices)}
    why = {
        host.name: f"is {state_of(host)}"
        for host in found.hosts
        if host.name in used and host.state == "drained"
    }
    reasons = grouped(why, SHOWN)
    more = [f"{len(reasons) - SHOWN} more reasons"] if len(reasons) > SHOWN else []
    return "; ".join([*reasons[:SHOWN], *more])


def hosts_given(
    slurm: Slurm, table: GpuTable, cluster: ClusterSpec, nodes: Sequence[str]
) -> Inventory:
    """The nodes of an allocation, treated as free."""
    seen = read_cluster(slurm, None, whole=True)
    use = Use(nodelist=frozenset(nodes), waits_for=BUSY, on_cpus=cluster.slurm.gpus == "none")
    found = seen.inventory(table, use)
    _check_known(seen, found, cluster.gpus_per_host)
    return Inventory(hosts=tuple(host for host in found.hosts if host.name in use.nodelist))


def _check_names(seen: Cluster, use: Use) -> None:
    """Slurm refuses a job that names a node which it does not have."""
    here = {node.name for node in seen.nodes}
    wrong = []
    for key, names in (("nodelist", use.nodelist), ("exclude", use.exclude)):
        if unknown := sorted(names - here - seen.elsewhere):
            wrong.append(f"cluster.slurm.{key}: unknown node {fold(unknown)}")
    if apart := sorted(use.nodelist & seen.elsewhere):
        where = seen.partition.name if seen.partition else ""
        wrong.append(f"cluster.slurm.nodelist: {fold(apart)} is not in partition {where}")
    if wrong:
        raise SpecError("\n".join(wrong), fix="use node names from `sinfo -N`, or remove the key")


def _check_selected(found: Inventory, use: Use, cluster: ClusterSpec) -> None:
    """Raises PlanError if the spec selects no host: fewer hosts or GPUs would not help."""
    refused = [h for h in found.hosts if h.state == "not selected" or h.name in use.exclude]
    if not refused or len(refused) < len(found.hosts):
        return
    spec = cluster.slurm
    selecting = {
        "cluster.gpu": cluster.gpu,
        "cluster.slurm.constraint": spec.constraint,
        "cluster.slurm.gpu_type": spec.gpu_type,
        "cluster.slurm.nodelist": spec.nodelist,
        "cluster.slurm.exclude": spec.exclude,
    }
    why = grouped({host.name: f"is {state_of(host)}" for host in refused}, SHOWN)
    raise PlanError(
        f"the spec leaves no host of the partition: {'; '.join(why[:SHOWN])}",
        fix=f"change or remove {' or '.join(key for key, set_to in selecting.items() if set_to)};"
        " `sinfo -N -o '%N %f %G'` shows the features and the GPUs of each node",
    )


def _check_known(seen: Cluster, found: Inventory, devices: int) -> None:
    """Raises PlanError if the GPU model of no host is known."""
    # Hosts that the job does not select do not count: their GPUs may be of a known model.
    chosen = [host for host in found.hosts if host.state not in ("excluded", "not selected")]
    able = [host for host in chosen if host.devices >= devices]
    if not able or any(host.profile for host in able):
        return
    node = next(node for node in seen.nodes if node.name == able[0].name)
    gres = f"gpu:{node.gpu_type}" if node.gpu_type else "gpu, without a type"
    features = f" (features: {', '.join(node.features)})" if node.features else ""
    entry = f'type: "{node.gpu_type or ""}"'
    if node.features and not node.gpu_type:
        entry = f"feature: {node.features[0]}"
    raise PlanError(
        f"unknown GPU model: Slurm reports {gres}{features} for {node.name}",
        fix="set cluster.slurm.gpus to none if ranks run on CPUs; or set cluster.gpu to one of"
        f" {', '.join(GPU_NAMES)}; or define it for all jobs in a"
        f" file, for example gpus: [{{{entry}, profile: h100-sxm-80gb}}], and set {SLURM_GPUS} to"
        f" its path; or give the hosts with --inventory FILE",
    )


def read_cluster(
    slurm: Slurm,
    partition: str | None,
    *,
    whole: bool = False,
    at: str = "cluster.slurm.partition",
) -> Cluster:
    """Read the nodes of `partition`, by default of the default partition; `whole`: of all. `at`:
    the key or option that names `partition`.

    Raises:
        BackendError: Slurm does not answer, or the partition does not exist.
    """
    looked_at = None
    if partition is not None or not whole:
        looked_at = _chosen(parse_partitions(slurm.told(PARTITIONS)), partition, at)
    every = nodes = parse_nodes(slurm.told(NODES))
    if looked_at is not None:
        inside = set(looked_at.nodes)
        nodes = tuple(
            node for node in every if node.name in inside or looked_at.name in node.partitions
        )
    named = (looked_at.topology,) if looked_at and looked_at.topology else ()
    topology = slurm.ask((*TOPOLOGY, *named))
    return Cluster(
        nodes=nodes,
        # Older versions refuse the command if there is no topology plugin.
        topology=parse_topology(topology.out) if topology.code == 0 else Topology(),
        partition=looked_at,
        elsewhere=frozenset({node.name for node in every} - {node.name for node in nodes}),
    )


def _chosen(partitions: Sequence[Partition], name: str | None, at: str) -> Partition | None:
    """The partition `name`, or several combined if separated by commas. None: no default exists."""
    if name is None:
        return next((one for one in partitions if one.default), None)
    by_name = {one.name: one for one in partitions}
    wanted = name.split(",")
    missing = [one for one in wanted if one not in by_name]
    if missing:
        raise BackendError(
            f"{at}: Slurm has no partition {', '.join(missing)}",
            fix=partition_fix(missing[0], by_name),
        )
    chosen = [by_name[one] for one in wanted]
    up = [one for one in chosen if one.state == "UP"] or chosen
    nodes = tuple(dict.fromkeys(node for one in up for node in one.nodes))
    return replace(up[0], name=name, nodes=nodes)

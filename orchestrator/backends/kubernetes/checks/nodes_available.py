"""Checks that the nodes for a job exist. Missing nodes only delay it: they may be created on
demand, and cordoned ones may become available."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import ApiReader
from orchestrator.backends.kubernetes.inventory import makes_nodes
from orchestrator.backends.kubernetes.resources import NODES
from orchestrator.contract.check_results import Finding
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import ClusterSpec
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.inventory.gpus import GpuTable
from orchestrator.inventory.hosts import Host, state_of
from orchestrator.inventory.kubernetes.gpus import KINDS
from orchestrator.inventory.kubernetes.inventory import inventory_of, use_of
from orchestrator.inventory.kubernetes.nodes import Node, parse_node

WHAT = "nodes"
NAMED = 4
"""Unusable nodes that a finding names with their reason; the others are counted."""


def nodes_there(
    api: ApiReader, plan: Plan, launch: LaunchPlan, table: GpuTable
) -> Iterator[Finding]:
    """Nodes that the job may use, even if other pods use them now."""
    spec = launch.kubernetes_spec
    try:
        nodes = [parse_node(item) for item in api.list(NODES, None).items]
    except Forbidden as exc:
        found = f"unknown, and not required: {exc.message}"
        yield Finding(what=WHAT, verdict="note", found=found)
        return
    cluster = ClusterSpec(
        backend="kubernetes", gpus_per_host=launch.devices_per_host, kubernetes=spec
    )
    use = replace(use_of(cluster), patient=True)
    hosts = inventory_of(nodes, {}, table, use).hosts
    able = [one for one in hosts if one.state == "free" and one.devices >= launch.devices_per_host]
    ours = [one for one in able if _is_of(plan, one)]
    yield _enough(api, spec, ours, hosts, launch)
    by_name = {node.name: node for node in nodes}
    asked = spec.topology.nodes if spec.topology else {}
    others = [one for one in able if not _is_of(plan, one) and _is_let_in(by_name[one.name], asked)]
    if others:
        yield _of_another_kind(plan, others, [by_name[one.name] for one in ours])


def _is_of(plan: Plan, host: Host) -> bool:
    """A host of an unknown kind may be of the plan's kind."""
    return host.profile is None or plan.profile is None or host.profile.name == plan.profile


def _is_let_in(node: Node, asked: Mapping[str, Sequence[str]]) -> bool:
    return all(node.labels.get(label) in values for label, values in asked.items())


def _enough(
    api: ApiReader,
    spec: KubernetesSpec,
    ours: Sequence[Host],
    hosts: Sequence[Host],
    launch: LaunchPlan,
) -> Finding:
    wanted = len(launch.hosts)
    of = f" with {launch.devices_per_host} {spec.gpu_resource}" if spec.gpu_resource else ""
    if len(ours) >= wanted:
        found = f"{len(ours)} nodes{of} fit; the job uses {wanted}"
        return Finding(what=WHAT, verdict="ok", found=found)
    left_out = [
        f"{one.name} is {state_of(one)}"
        if one.state != "free"
        else f"{one.name} has {one.devices} of {launch.devices_per_host} devices"
        for one in hosts
        if one not in ours and (one.state != "free" or one.devices < launch.devices_per_host)
    ]
    shown = "; ".join(left_out[:NAMED])
    more = f"; and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
    maker = f"queue {spec.queue}" if spec.queue else makes_nodes(api)
    wait = f"until {maker} adds them" if maker else "until more exist"
    return Finding(
        what=WHAT,
        verdict="warns",
        found=f"{len(ours)} of the {wanted} nodes{of} that the job needs exist; its pods wait"
        f" {wait}" + (f" ({shown}{more})" if shown else ""),
        fix="wait if nodes are created on demand; else request fewer hosts or less per host",
    )


def _of_another_kind(plan: Plan, others: Sequence[Host], ours: Sequence[Node]) -> Finding:
    """Pods may be scheduled to nodes of another kind, which may be slower or have less memory."""
    first = others[0]
    kind = first.profile.name if first.profile else ""
    more = f", as are {len(others) - 1} more of other kinds" if len(others) > 1 else ""
    label = next((label for label in KINDS if any(label in node.labels for node in ours)), KINDS[0])
    value = next((node.labels[label] for node in ours if label in node.labels), "…")
    return Finding(
        what=WHAT,
        verdict="warns",
        found=f"the plan is for {plan.profile}, but pods may be scheduled to {first.name}, which is"
        f" {kind}{more}",
        fix=f"set cluster.kubernetes.node_selector: {{{label}: {value}}}",
    )

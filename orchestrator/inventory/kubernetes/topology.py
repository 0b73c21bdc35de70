"""Labels of nodes as the switches above them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.inventory.hosts import Host, tree_of
from orchestrator.inventory.kubernetes.nodes import Node, parse_node


def levels_of(nodes: Iterable[Node], labels: Sequence[str]) -> tuple[str, ...]:
    """Of `labels`, the outermost first, those that a node has."""
    known = {label for node in nodes for label in node.labels}
    return tuple(label for label in labels if label in known)


def switches_of(node: Node, levels: Sequence[str]) -> tuple[str, ...]:
    """From the outermost down to the first that the node does not name: what hangs below a switch
    that nobody knows hangs nobody knows where."""
    path = []
    for label in levels:
        if not (value := node.labels.get(label)):
            break
        path.append(value)
    return tuple(path)


def allocation_switches(
    items: Iterable[Mapping[str, Any]], spec: KubernetesSpec
) -> dict[str, tuple[str, ...]]:
    """What `Allocation.switches` holds, of a job's nodes as the API gives them: an NVLink block is
    the innermost switch."""
    nodes = [parse_node(item) for item in items]
    levels = levels_of(nodes, spec.topology_labels)
    return tree_of(
        Host(
            name=node.name,
            devices=0,
            switches=switches_of(node, levels),
            nvlink_block=node.labels.get(spec.nvlink_label),
        )
        for node in nodes
    )

"""Reads labels of nodes as the switches above them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.inventory.hosts import Host, tree_of
from orchestrator.inventory.kubernetes.nodes import Node, parse_node


def levels_of(nodes: Iterable[Node], labels: Sequence[str]) -> tuple[str, ...]:
    """The `labels` that some node has, outermost first."""
    known = {label for node in nodes for label in node.labels}
    return tuple(label for label in labels if label in known)


def switches_of(node: Node, levels: Sequence[str]) -> tuple[str, ...]:
    """From the outermost switch down to the first one that the node does not name. Below an unknown
    switch the position is unknown."""
    path = []
    for label in levels:
        if not (value := node.labels.get(label)):
            break
        path.append(value)
    return tuple(path)


def allocation_switches(
    items: Iterable[Mapping[str, Any]], spec: KubernetesSpec
) -> dict[str, tuple[str, ...]]:
    """`Allocation.switches` from the nodes of a job. An NVLink block is the innermost switch."""
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

"""Decides whether a node is open for a job's pods, and which own nodes a job should leave."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from orchestrator.contract.spec.kubernetes_spec import Toleration
from orchestrator.inventory.hosts import State
from orchestrator.inventory.kubernetes.nodes import READY, Node, parse_node
from orchestrator.inventory.kubernetes.taints import CORDONED, is_tolerated, untolerated


class Shut(Struct, frozen=True):
    """A node that is closed for the job's pods."""

    node: str
    state: State
    reason: str = ""


def shut(node: Node, tolerations: Sequence[Toleration]) -> Shut | None:
    """What keeps pods with these tolerations off a node; None: nothing."""
    return next(_shut(node, tolerations), None)


def _shut(node: Node, tolerations: Sequence[Toleration]) -> Iterator[Shut]:
    if node.leaving:
        yield Shut(node.name, "being deleted")
    if node.ready != READY:
        yield Shut(node.name, "not ready", node.why)
    if node.unschedulable and not is_tolerated(CORDONED, tolerations):
        yield Shut(node.name, "cordoned")
    for taint in untolerated(node, tolerations):
        yield Shut(node.name, "tainted", str(taint))


def shut_nodes(
    items: Iterable[Mapping[str, Any]], tolerations: Sequence[Toleration]
) -> tuple[Shut, ...]:
    """Nodes of a running job that it should leave, because its pods there will be ended: the node
    is cordoned, has a NoExecute taint, or is being deleted.

    A silent kubelet is no reason: kubelets are restarted while their pods run on, and the agent
    shows whether the node lives. A NoSchedule taint is no reason either, because it only stops new
    pods.
    """
    found = (next(_ends_pods(parse_node(item), tolerations), None) for item in items)
    return tuple(one for one in found if one is not None)


def _ends_pods(node: Node, tolerations: Sequence[Toleration]) -> Iterator[Shut]:
    if node.leaving:
        yield Shut(node.name, "being deleted")
    if node.unschedulable and not is_tolerated(CORDONED, tolerations):
        yield Shut(node.name, "cordoned")
    for taint in untolerated(node, tolerations):
        if taint.effect == "NoExecute":
            yield Shut(node.name, "tainted", str(taint))

"""Finds the taints that keep a job off a node."""

from collections.abc import Sequence

from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec, Toleration
from orchestrator.inventory.kubernetes.nodes import Node, Taint

KEEPS_OFF = ("NoSchedule", "NoExecute")
CORDONED = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
"""Taint that the node controller sets on every cordoned node."""
NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def tolerations_of(spec: KubernetesSpec) -> tuple[Toleration, ...]:
    """What a job's pods tolerate: what the spec says, and the taint named like the GPU resource,
    with which sites reserve nodes with devices for pods that request them."""
    wanted = [name for name in (spec.gpu_resource, spec.rdma_resource) if name]
    own = (Toleration(key=name, operator="Exists", effect="NoSchedule") for name in wanted)
    return (*spec.tolerations, *(one for one in own if one not in spec.tolerations))


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect not in ("", taint.effect) or toleration.key not in ("", taint.key):
        return False
    if toleration.operator == "Equal":
        return toleration.value == taint.value and bool(toleration.key)
    return True


def is_tolerated(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    return any(tolerates(one, taint) for one in tolerations)


def untolerated(node: Node, tolerations: Sequence[Toleration]) -> tuple[Taint, ...]:
    """Taints that keep a pod off `node`, without those for its cordon and its condition."""
    return tuple(
        taint
        for taint in node.taints
        if taint.effect in KEEPS_OFF
        and taint.key not in (CORDONED.key, *NOT_READY)
        and not is_tolerated(taint, tolerations)
    )

"""The parts of a Node object that decide whether a job can run there."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from msgspec import Struct, field

from orchestrator.inventory.kubernetes.quantities import quantity

READY, SILENT = "True", "Unknown"


class Taint(Struct, frozen=True):
    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        """In the form of `kubectl taint`."""
        return (
            f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"
        )


class Node(Struct, frozen=True, kw_only=True):
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)
    """Resource -> amount that pods may use. It excludes what the kubelet and the system reserve,
    and unhealthy devices."""
    capacity: Mapping[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    ready: str | None = READY
    """Status of the condition Ready: True, False or Unknown; None: not reported yet."""
    why: str = ""
    """Reason and message of that condition, unless it is True."""
    leaving: bool = False
    """The Node object is being deleted."""

    def can_give(self, resource: str) -> Fraction:
        return quantity(self.allocatable.get(resource, "0"))

    @property
    def is_virtual(self) -> bool:
        """Whether it is no machine: a virtual kubelet, or a provider that starts one per pod."""
        return (
            self.labels.get("type") == "virtual-kubelet"
            or self.labels.get("eks.amazonaws.com/compute-type") == "fargate"
            or any(taint.key == "virtual-kubelet.io/provider" for taint in self.taints)
        )


def parse_node(item: Mapping[str, Any]) -> Node:
    """From a Node of the API."""
    meta, spec, status = (item.get(key) or {} for key in ("metadata", "spec", "status"))
    ready, why = _ready(status.get("conditions") or ())
    return Node(
        name=meta["name"],
        labels=meta.get("labels") or {},
        allocatable=status.get("allocatable") or {},
        capacity=status.get("capacity") or {},
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            Taint(one["key"], one.get("value") or "", one["effect"])
            for one in spec.get("taints") or ()
        ),
        ready=ready,
        why=why,
        leaving="deletionTimestamp" in meta,
    )


def _ready(conditions: Any) -> tuple[str | None, str]:
    for one in conditions:
        if one.get("type") == "Ready":
            said = ": ".join(filter(None, (one.get("reason"), one.get("message"))))
            return one.get("status"), "" if one.get("status") == READY else said
    return None, "its kubelet has reported nothing yet"

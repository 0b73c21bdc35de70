"""Sums up what pods use on their nodes, in the way Kubernetes' scheduler does."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from orchestrator.inventory.kubernetes.quantities import quantity

OVER = ("Succeeded", "Failed")
NOTHING = Fraction(0)


@dataclass(slots=True)
class Taken:
    """Used resources of one node."""

    amounts: dict[str, Fraction] = field(default_factory=dict)
    """Resource -> amount that its pods request."""
    by: dict[str, list[str]] = field(default_factory=dict)
    """Resource -> its users, as NAMESPACE/POD."""

    def of(self, resource: str) -> Fraction:
        return self.amounts.get(resource, NOTHING)


def taken(pods: Iterable[Mapping[str, Any]], resources: Sequence[str]) -> Mapping[str, Taken]:
    """Node -> use of `resources` there.

    A pod that has ended uses nothing. A pod that is being deleted uses everything until it is gone.
    """
    found: dict[str, Taken] = defaultdict(Taken)
    for pod in pods:
        node = (pod.get("spec") or {}).get("nodeName")
        if not node or (pod.get("status") or {}).get("phase") in OVER:
            continue
        for resource in resources:
            if amount := asked_for(pod["spec"], resource):
                at = found[node]
                at.amounts[resource] = at.of(resource) + amount
                meta = pod["metadata"]
                who = f"{meta.get('namespace', 'default')}/{meta['name']}"
                at.by.setdefault(resource, []).append(who)
    return dict(found)


def asked_for(spec: Mapping[str, Any], resource: str) -> Fraction:
    """Amount of `resource` that a pod with this `spec` requests.

    Containers run at the same time, so their requests are added. Init containers run one after the
    other before them, so the largest request counts if it is more. Init containers with
    `restartPolicy: Always` (sidecars) keep running beside everything that starts later. A request
    of the pod as a whole replaces all of these. The overhead of its RuntimeClass is added.
    """
    overhead = quantity((spec.get("overhead") or {}).get(resource, 0))
    whole = _request(spec, resource)
    if whole is not None:
        return whole + overhead
    beside = most = NOTHING
    for one in spec.get("initContainers") or ():
        amount = _request(one, resource) or NOTHING
        if one.get("restartPolicy") == "Always":
            beside += amount
            most = max(most, beside)
        else:
            most = max(most, beside + amount)
    running = beside + sum(
        (_request(one, resource) or NOTHING for one in spec.get("containers") or ()), NOTHING
    )
    return max(most, running) + overhead


def _request(part: Mapping[str, Any], resource: str) -> Fraction | None:
    """Request of a container or of a whole pod. A limit without a request counts as the request."""
    resources = part.get("resources") or {}
    for kind in ("requests", "limits"):
        if (amount := (resources.get(kind) or {}).get(resource)) is not None:
            return quantity(amount)
    return None

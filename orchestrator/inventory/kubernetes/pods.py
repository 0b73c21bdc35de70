"""What pods take of the nodes that they are bound to, counted as Kubernetes' scheduler does."""

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
    """Of one node."""

    amounts: dict[str, Fraction] = field(default_factory=dict)
    """Resource -> what its pods ask for."""
    by: dict[str, list[str]] = field(default_factory=dict)
    """Resource -> who, as NAMESPACE/POD."""

    def of(self, resource: str) -> Fraction:
        return self.amounts.get(resource, NOTHING)


def taken(pods: Iterable[Mapping[str, Any]], resources: Sequence[str]) -> Mapping[str, Taken]:
    """Node -> what of `resources` is taken there.

    A pod that has ended holds nothing any more; one that is being deleted holds all it has, until
    it is gone.
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
    """Of `resource` by a pod with this `spec`.

    Containers run at once, so their requests add up. Init containers run before, one at a time, and
    what they need at most counts where it is more; but those with `restartPolicy: Always`, the
    sidecars, stay beside everything that starts after them. A request for the pod as a whole stands
    for all of these. The overhead of its RuntimeClass comes on top.
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
    """Of a container, or of a pod as a whole; a limit without a request is one."""
    resources = part.get("resources") or {}
    for kind in ("requests", "limits"):
        if (amount := (resources.get(kind) or {}).get(resource)) is not None:
            return quantity(amount)
    return None

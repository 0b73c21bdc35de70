"""Excluded nodes in the pod templates of an existing job object. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.backends.kubernetes.render.topology import CHANGEABLE, HOSTNAME
from orchestrator.backends.kubernetes.resources import Object, lookup
from orchestrator.contract.spec.kubernetes_spec import Kind

INSTALL = "kubectl apply -k manifests/controller"
TERMS = (
    "affinity",
    "nodeAffinity",
    "requiredDuringSchedulingIgnoredDuringExecution",
    "nodeSelectorTerms",
)


def without(kind: Kind, job: Object, hosts: Sequence[str]) -> dict[str, Any]:
    """The merge patch that excludes `hosts` for new pods, in addition to excluded ones.

    Empty if nothing changes, or if the pod template of this kind cannot change (that of a Job never
    can). Only the controller may send it, because only it may change a job.
    """
    if kind not in CHANGEABLE or not hosts:
        return {}
    replicas: Mapping[str, Any] = lookup(job, ("spec", "pytorchReplicaSpecs"), {})
    changed = {
        name: {"template": {"spec": _affinity(lookup(one, ("template", "spec"), {}), hosts)}}
        for name, one in replicas.items()
    }
    return {"spec": {"pytorchReplicaSpecs": changed}}


def not_kept_off(hosts: Sequence[str]) -> str:
    """Advice for a cluster without a controller that excludes `hosts`."""
    return (
        f"no controller excludes {', '.join(hosts)} for new pods of this job: `kubectl cordon"
        f" {' '.join(hosts)}` keeps all pods off; a controller (`{INSTALL}`) does it for this job"
    )


def _affinity(pod_spec: Object, hosts: Sequence[str]) -> dict[str, Any]:
    """Node selector terms are alternatives (OR), so each must exclude the hosts."""
    before: Sequence[Object] = lookup(pod_spec, TERMS, ()) or ({},)
    terms = [_leave_out(term, hosts) for term in before]
    return {TERMS[0]: {TERMS[1]: {TERMS[2]: {TERMS[3]: terms}}}}


def _leave_out(term: Object, hosts: Sequence[str]) -> dict[str, Any]:
    rules = list(term.get("matchExpressions") or ())
    before = [rule for rule in rules if _is_ours(rule)]
    names = {*hosts, *(value for rule in before for value in rule["values"])}
    ours = {"key": HOSTNAME, "operator": "NotIn", "values": sorted(names)}
    return {**term, "matchExpressions": [*(r for r in rules if not _is_ours(r)), ours]}


def _is_ours(rule: Object) -> bool:
    return rule.get("key") == HOSTNAME and rule.get("operator") == "NotIn"

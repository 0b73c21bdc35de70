"""Pods that a Job of Kubernetes counts, on a node that does not answer any more. Pure.

A Job with a podFailurePolicy, as of a JobSet and a TrainJob, makes a pod anew once the old one
has Failed, and its finalizer holds the object until then. The kubelet that would say so is gone: a
pod that is deleted by force would stay for ever, and its host never be replaced. So whoever deletes
it says that it has Failed, as Kubernetes' own pod garbage collector does."""

from typing import Any

from orchestrator.backends.kubernetes.observe.object_fields import is_over
from orchestrator.backends.kubernetes.resources import Object, lookup, name_of

FINALIZER = "batch.kubernetes.io/job-tracking"
LOST = "NodeLost"


def is_held(pod: Object) -> bool:
    """Deletion by force alone would not take it away."""
    return FINALIZER in lookup(pod, ("metadata", "finalizers"), ()) and not is_over(pod)


def failed(pod: Object) -> dict[str, Any]:
    """The change of its status; a disruption, which no podFailurePolicy of ours counts."""
    conditions = lookup(pod, ("status", "conditions"), ())
    kept = [one for one in conditions if one.get("type") != "DisruptionTarget"]
    said = "ndctl: its node is unreachable"
    lost = {"type": "DisruptionTarget", "status": "True", "reason": LOST, "message": said}
    status = {"phase": "Failed", "reason": LOST, "message": said, "conditions": [*kept, lost]}
    return {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}


def by_force(pod: Object) -> str:
    """What is typed to have it gone."""
    of = f"kubectl -n {lookup(pod, ('metadata', 'namespace'), 'NAMESPACE')}"
    name = name_of(pod)
    delete = f"{of} delete pod {name} --force --grace-period=0"
    if not is_held(pod):
        return delete
    change = """'{"status":{"phase":"Failed"}}'"""
    return f"{of} patch pod {name} --subresource=status --type=merge -p {change} && {delete}"

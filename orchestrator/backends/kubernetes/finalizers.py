"""Pods of a Kubernetes Job on an unreachable node. Pure.

A Job with a podFailurePolicy (JobSets and TrainJobs have one) creates a new pod once the old one
has Failed, and a finalizer keeps the old pod until then. The kubelet that would report the failure
is unreachable, so even a pod that is deleted by force would stay forever. Therefore the program
that deletes it first sets its phase to Failed, as Kubernetes' own pod garbage collector does."""

from typing import Any

from orchestrator.backends.kubernetes.observe.object_fields import is_over
from orchestrator.backends.kubernetes.resources import Object, lookup, name_of

FINALIZER = "batch.kubernetes.io/job-tracking"
LOST = "NodeLost"


def is_held(pod: Object) -> bool:
    """A finalizer holds the pod, so deletion by force alone would not remove it."""
    return FINALIZER in lookup(pod, ("metadata", "finalizers"), ()) and not is_over(pod)


def failed(pod: Object) -> dict[str, Any]:
    """The status patch: Failed by a disruption, which ndctl's podFailurePolicy does not count."""
    conditions = lookup(pod, ("status", "conditions"), ())
    kept = [one for one in conditions if one.get("type") != "DisruptionTarget"]
    said = "ndctl: its node is unreachable"
    lost = {"type": "DisruptionTarget", "status": "True", "reason": LOST, "message": said}
    status = {"phase": "Failed", "reason": LOST, "message": said, "conditions": [*kept, lost]}
    return {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}


def by_force(pod: Object) -> str:
    """The kubectl command that removes it."""
    of = f"kubectl -n {lookup(pod, ('metadata', 'namespace'), 'NAMESPACE')}"
    name = name_of(pod)
    delete = f"{of} delete pod {name} --force --grace-period=0"
    if not is_held(pod):
        return delete
    change = """'{"status":{"phase":"Failed"}}'"""
    return f"{of} patch pod {name} --subresource=status --type=merge -p {change} && {delete}"
